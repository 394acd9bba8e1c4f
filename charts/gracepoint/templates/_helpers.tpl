{{- define "gracepoint.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "gracepoint.selectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "gracepoint.testLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}-test
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Of the snapshot servers. The operator finds them by the last one. */}}
{{- define "gracepoint.snapshotSelectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}-snapshots
app.kubernetes.io/instance: {{ .Release.Name }}
gracepoint.dev/snapshot-server: {{ include "gracepoint.fullname" . }}-snapshots
{{- end -}}

{{- define "gracepoint.snapshotTlsSecret" -}}
{{- if eq .Values.tls.mode "existingSecret" -}}
{{ required (printf "snapshots.existingSecret: found nothing, expected the name of a Secret with tls.crt and tls.key for %s-snapshots.%s.svc, as tls.mode is existingSecret" (include "gracepoint.fullname" .) .Release.Namespace) .Values.snapshots.existingSecret }}
{{- else if eq .Values.tls.mode "certManager" -}}
{{ include "gracepoint.fullname" . }}-snapshots-tls
{{- else -}}
{{ include "gracepoint.fullname" . }}-snapshots
{{- end -}}
{{- end -}}

{{/* An amount of memory in bytes (the value's name, the amount). The schema has checked its form. */}}
{{- define "gracepoint.snapshotBytes" -}}
{{- $amount := required (printf "%s: found nothing, expected an amount of memory, such as 64Gi" (first .)) (last .) -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mul (regexFind "^[0-9]+" $amount | int64) (index $units (regexFind "[A-Za-z]*$" $amount) | int64) -}}
{{- end -}}

{{/* The chart's own labels, and the common ones that are not among them: a key that is there twice is no valid YAML. */}}
{{- define "gracepoint.labels" -}}
{{- $own := include "gracepoint.selectorLabels" . | fromYaml -}}
{{- $_ := set $own "app.kubernetes.io/version" .Chart.AppVersion -}}
{{- $_ := set $own "app.kubernetes.io/part-of" "gracepoint" -}}
{{- $_ := set $own "app.kubernetes.io/managed-by" .Release.Service -}}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version) -}}
{{- merge $own .Values.commonLabels | toYaml -}}
{{- end -}}

{{/* Annotations of every object that has none of its own. */}}
{{- define "gracepoint.annotations" -}}
{{- with .Values.commonAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
{{- end -}}
{{- end -}}

{{- define "gracepoint.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "gracepoint.fullname" .) }}
{{- else -}}
{{ required "serviceAccount.name: found nothing, expected the name of a ServiceAccount, as serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{/* The ResourceQuota of the namespace that keeps the pods from having their system class; empty if none does. A quota
     that is about the class must leave room for all pods and the one that comes first in an upgrade, and count nothing
     but pods: the operator's have no limits of everything. */}}
{{- define "gracepoint.forbiddingQuota" -}}
{{- $class := .Values.priorityClassName -}}
{{- $pods := add 1 .Values.replicas | int -}}
{{- if hasPrefix "system-" $class -}}
{{- range (lookup "v1" "ResourceQuota" .Release.Namespace "").items -}}
{{- $about := has "PriorityClass" (.spec.scopes | default list) -}}
{{- range ((.spec.scopeSelector | default dict).matchExpressions | default list) -}}
{{- if eq .scopeName "PriorityClass" -}}
{{- $named := has $class (.values | default list) -}}
{{- $about = or (eq .operator "Exists") (and $named (eq .operator "In")) (and (not $named) (eq .operator "NotIn")) -}}
{{- end -}}
{{- end -}}
{{- $allows := true -}}
{{- range $what, $amount := .spec.hard -}}
{{- $number := regexMatch "^[0-9]+$" (toString $amount) -}}
{{- if or (not (has $what (list "pods" "count/pods"))) (and $number (lt (int $amount) $pods)) -}}{{ $allows = false }}{{- end -}}
{{- end -}}
{{- if and $about (not $allows) }}{{ .metadata.name }} {{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "gracepoint.priorityClassName" -}}
{{- if not (include "gracepoint.forbiddingQuota" .) -}}{{ .Values.priorityClassName }}{{- end -}}
{{- end -}}

{{/* Security context of the pods. Single values of podSecurityContext take the place of these. */}}
{{- define "gracepoint.podSecurityContext" -}}
{{- $context := dict "runAsNonRoot" true "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- if .Values.fixedIds -}}
{{- $context = merge $context (dict "runAsUser" 65532 "runAsGroup" 65532 "fsGroup" 65532) -}}
{{- end -}}
{{- range $field, $value := .Values.podSecurityContext }}{{ $_ := set $context $field $value }}{{ end -}}
{{- toYaml $context -}}
{{- end -}}

{{- define "gracepoint.securityContext" -}}
{{- $drop := dict "drop" (list "ALL") -}}
{{- $context := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" $drop -}}
{{- range $field, $value := .Values.securityContext }}{{ $_ := set $context $field $value }}{{ end -}}
{{- toYaml $context -}}
{{- end -}}

{{/* The name that pods and the API server check the certificate against. */}}
{{- define "gracepoint.host" -}}
{{ include "gracepoint.fullname" . }}.{{ .Release.Namespace }}.svc
{{- end -}}

{{- define "gracepoint.tlsSecret" -}}
{{- if eq .Values.tls.mode "existingSecret" -}}
{{ required "tls.existingSecret: found nothing, expected the name of a Secret, as tls.mode is existingSecret" .Values.tls.existingSecret }}
{{- else if eq .Values.tls.mode "selfSigned" -}}
{{ include "gracepoint.fullname" . }}-certificates
{{- else -}}
{{ include "gracepoint.fullname" . }}-tls
{{- end -}}
{{- end -}}

{{/* The data of the certificate that a chart before 0.3 made. Nothing if there is none. */}}
{{- define "gracepoint.formerCertificate" -}}
{{- if eq .Values.tls.mode "selfSigned" -}}
{{- $found := (lookup "v1" "Secret" .Release.Namespace (printf "%s-tls" (include "gracepoint.fullname" .))) | default dict -}}
{{- $data := $found.data | default dict -}}
{{- if and (index $data "ca.crt") (index $data "tls.crt") (index $data "tls.key") -}}
{{- toJson $data -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What the webhooks' paths are made of, as nothing else shows that a caller is the API server. Made once in a rendering,
     unless it is there already. */}}
{{- define "gracepoint.token" -}}
{{- if not .Values.admission.token -}}
{{- /* Every cluster has this namespace. If it is not found, the chart is rendered without a cluster. */ -}}
{{- $_ := set .Values.admission "unkept" (not (lookup "v1" "Namespace" "" "kube-system")) -}}
{{- $secret := printf "%s-webhooks" (include "gracepoint.fullname" .) -}}
{{- $kept := ((lookup "v1" "Secret" .Release.Namespace $secret) | default dict).data | default dict -}}
{{- $_ := set .Values.admission "token" (index $kept "token" | default "" | b64dec | default (randAlphaNum 40)) -}}
{{- end -}}
{{ .Values.admission.token }}
{{- end -}}

{{/* Who writes caBundle into the webhook configurations: chart, cert-manager or operator. */}}
{{- define "gracepoint.authoritiesFrom" -}}
{{- if and .Values.tls.caCertificate (eq .Values.tls.mode "selfSigned") -}}
{{- fail "tls.caCertificate: found a certificate, but tls.mode is selfSigned, where the operator makes the authority; leave it out, or set tls.mode to existingSecret or certManager" -}}
{{- end -}}
{{- if .Values.tls.caCertificate -}}chart{{- else if eq .Values.tls.mode "certManager" -}}cert-manager{{- else -}}operator{{- end -}}
{{- end -}}

{{/* The caBundle that the chart sets in a webhook configuration (chart, kind, name). Mostly empty: what no revision of a
     release has set, no upgrade and no rollback takes away. What the revision before has set is repeated as it is in the
     cluster, as it would be deleted otherwise. Charts up to 0.2 left no mark of it: they set it from their second revision
     on, and the first ones also in the first. */}}
{{- define "gracepoint.caBundle" -}}
{{- $chart := index . 0 -}}
{{- if eq (include "gracepoint.authoritiesFrom" $chart) "chart" -}}
{{ $chart.Values.tls.caCertificate | b64enc }}
{{- else -}}
{{- $found := (lookup "admissionregistration.k8s.io/v1" (index . 1) "" (index . 2)) | default dict -}}
{{- $metadata := $found.metadata | default dict -}}
{{- $was := dict "set" (gt (int $chart.Release.Revision) 2) -}}
{{- range $metadata.managedFields -}}
{{- if and (ne .manager "gracepoint-operator") (contains "f:caBundle" (toJson .fieldsV1)) -}}{{- $_ := set $was "set" true -}}{{- end -}}
{{- end -}}
{{- if and $was.set (not (hasKey ($metadata.annotations | default dict) "gracepoint.dev/authorities-from")) -}}
{{- $webhook := first ($found.webhooks | default (list dict)) -}}
{{- ($webhook.clientConfig | default dict).caBundle | default "" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Annotations of a webhook configuration (chart, its caBundle). */}}
{{- define "gracepoint.webhookAnnotations" -}}
{{- $chart := first . -}}
{{- $from := include "gracepoint.authoritiesFrom" $chart -}}
{{- $annotations := dict -}}
{{- if not (last .) -}}{{- $_ := set $annotations "gracepoint.dev/authorities-from" $from -}}{{- end -}}
{{- if eq $from "cert-manager" -}}
{{- $_ := set $annotations "cert-manager.io/inject-ca-from" (printf "%s/%s" $chart.Release.Namespace (include "gracepoint.fullname" $chart)) -}}
{{- end -}}
{{- with merge $annotations $chart.Values.commonAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
{{- end -}}
{{- end -}}

{{/* Those of this chart and of all charts together; each is a name, or an object with it. */}}
{{- define "gracepoint.imagePullSecrets" -}}
{{- $names := list -}}
{{- range concat .Values.imagePullSecrets ((.Values.global | default dict).imagePullSecrets | default list) -}}
{{- $names = append $names (ternary . (dict "name" .) (kindIs "map" .)) -}}
{{- end -}}
{{ $names | uniq | toYaml }}
{{- end -}}

{{/* The image, by its digest where one is given. */}}
{{- define "gracepoint.image" -}}
{{- $registry := .Values.image.registry | default (.Values.global | default dict).imageRegistry -}}
{{- $repository := ternary .Values.image.repository (printf "%s/%s" $registry .Values.image.repository) (empty $registry) -}}
{{- if .Values.image.digest -}}
{{ printf "%s@%s" $repository .Values.image.digest }}
{{- else -}}
{{ printf "%s:%s" $repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end -}}
{{- end -}}

{{/* Whether readers of the metrics must show a token: "true", or nothing. */}}
{{- define "gracepoint.metricsNeedToken" -}}
{{- $wanted := toString .Values.metrics.requireToken -}}
{{- if or (eq $wanted "true") (and (eq $wanted "auto") .Values.podMonitor.enabled) }}true{{ end -}}
{{- end -}}

{{/* Binds a ClusterRole (chart, its name) for the operator: everywhere, or in each of watchNamespaces. */}}
{{- define "gracepoint.bindingInNamespaces" -}}
{{- $chart := first . -}}
{{- range $namespace := $chart.Values.watchNamespaces | default (list "") }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ empty $namespace | ternary "ClusterRoleBinding" "RoleBinding" }}
metadata:
  name: {{ last $ }}
  {{- with $namespace }}
  namespace: {{ . }}
  {{- end }}
  {{- include "gracepoint.annotations" $chart }}
  labels: {{- include "gracepoint.labels" $chart | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: ClusterRole
  name: {{ last $ }}
subjects:
  - kind: ServiceAccount
    name: {{ include "gracepoint.serviceAccountName" $chart }}
    namespace: {{ $chart.Release.Namespace }}
{{- end }}
{{- end -}}

{{/* The selector of a webhook that limits how many objects a namespace has: wherever the operator keeps them, also in
     namespaces whose workloads it leaves alone. */}}
{{- define "gracepoint.watchedNamespaces" -}}
{{- with .Values.watchNamespaces }}
    namespaceSelector:
      matchExpressions:
        - {key: kubernetes.io/metadata.name, operator: In, values: {{ toJson . }}}
{{- end }}
{{- end -}}

{{/* The namespaces of a webhook (chart, those that it never gets), as the values of a namespaceSelector's expression. */}}
{{- define "gracepoint.webhookNamespaces" -}}
{{- $chart := first . -}}
{{- $excluded := concat (last .) $chart.Values.admission.excludedNamespaces | uniq -}}
{{- with $chart.Values.watchNamespaces }}
          operator: In
          values: {{ toJson . }}
{{- else }}
          operator: NotIn
          values: {{ $excluded | toJson }}
{{- end }}
{{- end -}}

{{/* Refuses namespaces that are both watched and left out, another release that answers for the same ones (a pod can listen
     to only one of them), and CRDs of another release, with the commands that Helm does not say. */}}
{{- define "gracepoint.refuseOthers" -}}
{{- $chart := . -}}
{{- range concat (list "kube-system") .Values.admission.excludedNamespaces -}}
{{- if has . $chart.Values.watchNamespaces -}}
{{- fail (printf "watchNamespaces: found %q, which the webhooks never get (kube-system, admission.excludedNamespaces); leave it out of one of the two" .) -}}
{{- end -}}
{{- end -}}
{{- $configurations := lookup "admissionregistration.k8s.io/v1" "MutatingWebhookConfiguration" "" "" | default dict -}}
{{- range $configuration := $configurations.items | default list -}}
{{- $annotations := $configuration.metadata.annotations | default dict -}}
{{- $release := index $annotations "meta.helm.sh/release-name" | default "" -}}
{{- $theirs := index $annotations "meta.helm.sh/release-namespace" | default "" -}}
{{- range $webhook := $configuration.webhooks | default list -}}
{{- if eq $webhook.name "jobsets.gracepoint.dev" -}}
{{- $theirs = $theirs | default ($webhook.clientConfig.service | default dict).namespace -}}
{{- $mine := eq $configuration.metadata.name (printf "00-%s" (include "gracepoint.fullname" $chart)) -}}
{{- if $release }}{{ $mine = eq $release $chart.Release.Name }}{{ end -}}
{{- if not (and $mine (eq $theirs $chart.Release.Namespace)) -}}
{{- $watched := list -}}
{{- range ($webhook.namespaceSelector | default dict).matchExpressions | default list -}}
{{- if and (eq .operator "In") (eq .key "kubernetes.io/metadata.name") -}}{{- $watched = .values -}}{{- end -}}
{{- end -}}
{{- $both := list -}}
{{- range $watched -}}{{- if has . $chart.Values.watchNamespaces -}}{{- $both = append $both . -}}{{- end -}}{{- end -}}
{{- if or (not $watched) (not $chart.Values.watchNamespaces) $both -}}
{{- $where := $both | default $watched | sortAlpha | join ", " | default "all namespaces" -}}
{{- fail (printf "Gracepoint is installed already: release %q in namespace %q (MutatingWebhookConfiguration %s) answers for %s. Two releases would both write into the same jobs, whose pods can listen to only one of them. Upgrade that one, or remove it (helm uninstall %s --namespace %s), or give each release namespaces of its own (watchNamespaces)." ($release | default $configuration.metadata.name) $theirs $configuration.metadata.name $where ($release | default "RELEASE") $theirs) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if .Values.crds.install -}}
{{- $foreign := list -}}
{{- $owner := "" -}}
{{- range $path, $_ := .Files.Glob "files/crds/*.yaml" -}}
{{- $found := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" (base $path | trimSuffix ".yaml") | default dict -}}
{{- with $found.metadata -}}
{{- $annotations := .annotations | default dict -}}
{{- $release := printf "%s/%s" (index $annotations "meta.helm.sh/release-namespace") (index $annotations "meta.helm.sh/release-name") -}}
{{- $byHelm := eq (index (.labels | default dict) "app.kubernetes.io/managed-by" | default "") "Helm" -}}
{{- if not (and $byHelm (eq $release (printf "%s/%s" $.Release.Namespace $.Release.Name))) -}}
{{- $foreign = append $foreign .name -}}
{{- $owner = ternary (printf "to release %s (namespace/name)" $release) "to no release of Helm" $byHelm -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $foreign -}}
{{- $names := join " " . -}}
{{- fail (printf "the CRDs belong %s. If that is installed, set crds.install=false. If not, let this release take them over with these two commands, and install it again:\n  kubectl label --overwrite crd %s app.kubernetes.io/managed-by=Helm\n  kubectl annotate --overwrite crd %s meta.helm.sh/release-name=%s meta.helm.sh/release-namespace=%s" $owner $names $names $.Release.Name $.Release.Namespace) -}}
{{- end -}}
{{- end -}}
{{- end -}}
