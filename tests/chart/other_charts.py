"""Values that people have set for other operators' charts, by the same names and in the same form.

The values are of cert-manager, Karpenter and kube-prometheus-stack (there below ``prometheusOperator``), as their
documentation shows them. Where these have several names for one thing, as for the contexts of security, it is that of
``helm create``.
"""

from __future__ import annotations

CERT_MANAGER = """
global:
  imagePullSecrets: [{name: image-pull-secret}]
  commonLabels: {team: platform}
  logLevel: 2
image: {registry: quay.io, repository: jetstack/gracepoint, tag: v1, pullPolicy: Always}
serviceAccount:
  create: true
  name: certs
  annotations: {eks.amazonaws.com/role-arn: "arn:aws:iam::1:role/x"}
  labels: {of: account}
podDisruptionBudget: {enabled: true, minAvailable: 1}
extraArgs: [--log-level=debug]
extraEnv: [{name: SOME_VAR, value: some value}]
deploymentAnnotations: {reloader.stakater.com/auto: "true"}
podLabels: {team: x}
podAnnotations: {cluster-autoscaler.kubernetes.io/safe-to-evict: "true"}
hostAliases: [{ip: 127.0.0.1, hostnames: [foo.local]}]
nodeSelector: {kubernetes.io/os: linux}
tolerations: [{key: CriticalAddonsOnly, operator: Exists}]
topologySpreadConstraints:
  - maxSkew: 2
    topologyKey: topology.kubernetes.io/zone
    whenUnsatisfiable: ScheduleAnyway
    labelSelector: {matchLabels: {app.kubernetes.io/instance: gp}}
resources: {requests: {cpu: 10m, memory: 32Mi}}
"""

KARPENTER = """
nameOverride: ""
fullnameOverride: ""
imagePullSecrets: [{name: private}]
serviceAccount: {create: true, name: "", annotations: {}}
replicas: 2
revisionHistoryLimit: 3
strategy: {rollingUpdate: {maxUnavailable: 1}}
podLabels: {app: x}
podAnnotations: {}
podDisruptionBudget: {maxUnavailable: 1}
podSecurityContext: {fsGroup: 65536}
priorityClassName: system-cluster-critical
terminationGracePeriodSeconds: 30
hostNetwork: false
dnsPolicy: ClusterFirst
dnsConfig: {options: [{name: ndots, value: "1"}]}
nodeSelector: {kubernetes.io/os: linux}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        - matchExpressions: [{key: karpenter.sh/nodepool, operator: DoesNotExist}]
tolerations: [{key: CriticalAddonsOnly, operator: Exists}]
extraVolumes:
  - name: aws-iam-token
    projected: {sources: [{serviceAccountToken: {audience: sts.amazonaws.com, path: token}}]}
extraVolumeMounts: [{name: aws-iam-token, mountPath: /var/run/secrets/eks, readOnly: true}]
logLevel: info
"""

PROMETHEUS = """
global: {imageRegistry: registry.example.com, imagePullSecrets: [as-a-name]}
commonLabels: {prometheus: stack}
image: {registry: "", repository: team/gracepoint, tag: v2, pullPolicy: IfNotPresent}
serviceAccount: {create: false, name: theirs}
service:
  annotations: {prometheus.io/scrape: "false"}
  labels: {of: service}
  ipFamilyPolicy: PreferDualStack
  ipFamilies: [IPv6, IPv4]
networkPolicy: {enabled: true}
podSecurityContext:
  {runAsNonRoot: true, runAsUser: 65534, runAsGroup: 65534, fsGroup: 65534, seccompProfile: {type: RuntimeDefault}}
securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
extraVolumes: [{name: more, emptyDir: {}}]
extraVolumeMounts: [{name: more, mountPath: /more}]
revisionHistoryLimit: 10
logFormat: json
logLevel: error
podMonitor: {enabled: true, labels: {release: prometheus}}
"""
