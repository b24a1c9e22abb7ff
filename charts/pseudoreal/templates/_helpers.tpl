{{- /* Adds the values that release 0.3.0 did not have, where they are missing: `helm upgrade --reuse-values` puts the values of the
release that runs in the place of this chart's own. All templates share them. */ -}}
{{- define "pseudoreal.completeValues" -}}
{{- include "pseudoreal.addMissing" (list .Values (.Files.Get "files/values-since-0.3.0.yaml" | fromYaml)) }}
{{- end }}

{{- define "pseudoreal.addMissing" -}}
{{- $values := index . 0 }}
{{- range $key, $default := index . 1 }}
{{- if not (hasKey $values $key) }}{{ $_ := set $values $key $default }}
{{- else if and (kindIs "map" $default) (kindIs "map" (index $values $key)) }}
{{- include "pseudoreal.addMissing" (list (index $values $key) $default) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "pseudoreal.fullname" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- /* The name of what belongs to no namespace, or lies in another one: releases of one name in two namespaces each have their own.
A namespace has no dot. */ -}}
{{- define "pseudoreal.clusterName" -}}
{{ .Release.Namespace }}.{{ include "pseudoreal.fullname" . }}
{{- end }}

{{- define "pseudoreal.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "pseudoreal.labels" -}}
{{ include "pseudoreal.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: pseudoreal
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "pseudoreal.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "pseudoreal.fullname" .) }}
{{- else }}{{ .Values.serviceAccount.name | default "default" }}{{ end }}
{{- end }}

{{- /* Refuses values without images. The defaults of release 0.3.0, which --reuse-values brings back, are names of an account of
Docker Hub that is not ours: whoever gets it would run code with the operator's rights. */ -}}
{{- define "pseudoreal.requireImages" -}}
{{- $missing := list }}{{ $commands := list }}{{ $options := list }}
{{- range $part := list "operator" "trainer" }}
{{- $repository := (index $.Values $part).image.repository }}
{{- if or (not $repository) (hasPrefix "pseudoreal/" $repository) }}
{{- $image := printf "REGISTRY/pseudoreal-%s" $part }}
{{- $missing = append $missing (printf "%s.image.repository is %q" $part $repository) }}
{{- $tagged := printf "%s:%s" $image $.Chart.AppVersion }}
{{- $commands = append $commands (printf "docker build --target %s --tag %s . && docker push %s" $part $tagged $tagged) }}
{{- $options = append $options (printf "--set %s.image.repository=%s" $part $image) }}
{{- end }}
{{- end }}
{{- if $missing }}
{{- fail (printf "\n%s, and this chart knows no published image of version %s.\nBuild what is missing in a checkout, push it to a registry of yours, and name it:\n\n  %s\n  helm upgrade --install %s ... %s\n" (join ", " $missing) $.Chart.AppVersion (join "\n  " $commands) $.Release.Name (join " " $options)) }}
{{- end }}
{{- end }}

{{- /* The reference of an image; call with (list $ "operator"). */ -}}
{{- define "pseudoreal.image" -}}
{{- $root := index . 0 }}{{ include "pseudoreal.requireImages" $root }}{{ $image := (index $root.Values (index . 1)).image -}}
{{- if $image.digest }}{{ $image.repository }}@{{ $image.digest }}
{{- else }}{{ $image.repository }}:{{ $image.tag | default $root.Chart.AppVersion }}{{ end }}
{{- end }}

{{- /* Ids of users and groups, as JSON. On OpenShift those of the namespace's range are given to pods that name none. */ -}}
{{- define "pseudoreal.podIds" -}}
{{- ternary dict .Values.podSecurityContext (.Capabilities.APIVersions.Has "security.openshift.io/v1") | toJson }}
{{- end }}

{{- define "pseudoreal.podSecurityContext" -}}
runAsNonRoot: true
{{- range $field, $number := omit (include "pseudoreal.podIds" . | fromJson) "fsGroup" }}
{{- if not (kindIs "invalid" $number) }}
{{ $field }}: {{ int64 $number }}
{{- end }}
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "pseudoreal.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "pseudoreal.reportHost" -}}
{{ include "pseudoreal.fullname" . }}.{{ .Release.Namespace }}.svc
{{- end }}

{{- define "pseudoreal.tlsSecret" -}}
{{- $made := ternary "issued-tls" "tls" (ne .Values.reports.certManager.issuerRef.name "") }}
{{- .Values.reports.tlsSecret | default (printf "%s-%s" (include "pseudoreal.fullname" .) $made) }}
{{- end }}

{{- /* The data of the endpoint's Secret: what the cluster has, else a new certificate, made once for all templates.
The authority's key is not kept, so it can sign nothing else. */ -}}
{{- define "pseudoreal.certificate" -}}
{{- if not (hasKey .Values.reports "certificate") }}
{{- $data := (lookup "v1" "Secret" .Release.Namespace (include "pseudoreal.tlsSecret" .) | default dict).data }}
{{- if not (or $data .Values.reports.tlsSecret .Values.reports.certManager.issuerRef.name) }}
{{- /* Every pod shakes hands, all of them at once after a restart, and signing with such keys costs a tenth of RSA. */}}
{{- $authority := genCAWithKey "pseudoreal-reports-ca" 3650 (genPrivateKey "ecdsa") }}
{{- $names := list (include "pseudoreal.reportHost" .) }}
{{- $signed := genSignedCertWithKey "pseudoreal-reports" nil $names 3650 $authority (genPrivateKey "ecdsa") }}
{{- $data = dict "ca.crt" ($authority.Cert | b64enc) "tls.crt" ($signed.Cert | b64enc) "tls.key" ($signed.Key | b64enc) }}
{{- end }}
{{- $_ := set .Values.reports "certificate" ($data | default dict) }}
{{- end }}
{{- toYaml .Values.reports.certificate }}
{{- end }}

{{- /* What the operator may do with the jobs of a namespace. It reads no Secrets and no nodes. */ -}}
{{- define "pseudoreal.rules" -}}
- apiGroups: [pseudoreal.dev]
  resources: [pseudorealjobs]
  # delete: spec.deadlines.ttlSecondsAfterFinished.
  verbs: [get, list, watch, delete]
- apiGroups: [pseudoreal.dev]
  resources: [pseudorealjobs/status]
  verbs: [patch]
# Where OwnerReferencesPermissionEnforcement is on, owning a child needs it.
- apiGroups: [pseudoreal.dev]
  resources: [pseudorealjobs/finalizers]
  verbs: [update]
- apiGroups: [batch]
  resources: [jobs]
  # get: whose it is that has the name of a child; patch: an execution that nothing can come of is given up.
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, persistentvolumeclaims]
  verbs: [get, create]
- apiGroups: [""]
  resources: [secrets]
  # By which the workers of a job know each other. It reads none.
  verbs: [create]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, create]
- apiGroups: [scheduling.k8s.io, scheduling.volcano.sh, scheduling.x-k8s.io]
  resources: [podgroups]
  # spec.scheduling.gang; get: whose it is that has the name of one.
  verbs: [get, create]
- apiGroups: [""]
  resources: [pods]
  # delete: those that cannot save any more, before their grace period is over.
  verbs: [get, list, watch, delete]
{{- if .Values.rbac.podLogs }}
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
{{- end }}
- apiGroups: [""]
  resources: [events]
  # list: why a claim for which pods wait has no volume, which only its events say.
  verbs: [create, list]
{{- end }}
