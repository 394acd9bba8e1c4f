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

{{- define "gracepoint.labels" -}}
{{ include "gracepoint.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: gracepoint
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* The name that pods and the API server check the certificate against. */}}
{{- define "gracepoint.host" -}}
{{ include "gracepoint.fullname" . }}.{{ .Release.Namespace }}.svc
{{- end -}}

{{- define "gracepoint.tlsSecret" -}}
{{- if eq .Values.tls.mode "existingSecret" -}}
{{ .Values.tls.existingSecret }}
{{- else -}}
{{ include "gracepoint.fullname" . }}-tls
{{- end -}}
{{- end -}}
{{/* What the webhooks' paths are made of, as nothing else shows that a caller is the API server. Made once in a rendering,
     unless it is there already. */}}
{{- define "gracepoint.token" -}}
{{- if not .Values.admission.token -}}
{{- $secret := printf "%s-webhooks" (include "gracepoint.fullname" .) -}}
{{- $kept := ((lookup "v1" "Secret" .Release.Namespace $secret) | default dict).data | default dict -}}
{{- $_ := set .Values.admission "token" (index $kept "token" | default "" | b64dec | default (randAlphaNum 40)) -}}
{{- end -}}
{{ .Values.admission.token }}
{{- end -}}
