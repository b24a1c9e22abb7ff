{{- define "llama.image" -}}
{{- if not .Values.image }}
{{- $image := printf "REGISTRY/pseudoreal-trainer:%s" .Chart.AppVersion }}
{{- fail (printf "\nimage is empty, and this chart knows no published image of version %s.\nBuild the trainer's in a checkout, push it to a registry of yours, and name it:\n\n  docker build --target trainer --tag %s . && docker push %s\n  helm upgrade --install %s ... --set image=%s\n" .Chart.AppVersion $image $image .Release.Name $image) }}
{{- end }}
{{- .Values.image }}
{{- end }}

{{- define "llama.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "llama.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* Claims that are ReadWriteOnce have their volumes on one node at a time: then all pods of the release, whichever
starts first, are on that node. */ -}}
{{- define "llama.affinity" -}}
{{- if eq .Values.storage.accessMode "ReadWriteOnce" }}
affinity:
  podAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
    - labelSelector: {matchLabels: {app.kubernetes.io/name: {{ .Chart.Name }}, app.kubernetes.io/instance: {{ .Release.Name }}}}
      topologyKey: kubernetes.io/hostname
{{- end }}
{{- end }}

{{- /* A Job with the trainer's image that runs files/NAME.sh, with the claim of the data at /data; call with a dict: root,
name, env, requests, deadline in seconds or nothing, and folder and source of another volume, which it only reads, or nothing. */ -}}
{{- define "llama.job" -}}
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ .root.Release.Name }}-{{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "llama.labels" .root | nindent 4 }}
spec:
  backoffLimit: 3
  {{- with .deadline }}
  activeDeadlineSeconds: {{ int64 . }}
  {{- end }}
  template:
    metadata:
      labels: {{- include "llama.labels" .root | nindent 8 }}
    spec:
      restartPolicy: Never
      nodeSelector: {kubernetes.io/os: linux}
      {{- include "llama.affinity" .root | trim | nindent 6 }}
      automountServiceAccountToken: false
      enableServiceLinks: false
      securityContext:
        runAsNonRoot: true
        seccompProfile: {type: RuntimeDefault}
        {{- if not (.root.Capabilities.APIVersions.Has "security.openshift.io/v1") }}
        {{- with .root.Values.podSecurityContext }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- end }}
      containers:
      - name: {{ .name }}
        image: {{ include "llama.image" .root | quote }}
        command: [sh, -c]
        args:
        - |
          {{- .root.Files.Get (printf "files/%s.sh" .name) | trim | nindent 10 }}
        env:
        - {name: HOME, value: /tmp}
        - {name: DATA, value: /data}
        {{- range $name, $value := .env }}
        - {name: {{ $name }}, value: {{ $value | quote }}}
        {{- end }}
        resources: {requests: {{ .requests | toJson }}}
        securityContext: {{- include "llama.containerSecurityContext" .root | nindent 10 }}
        volumeMounts:
        - {name: data, mountPath: /data}
        - {name: tmp, mountPath: /tmp}
        {{- if .source }}
        - {name: other, mountPath: {{ .folder }}, readOnly: true}
        {{- end }}
      volumes:
      - name: data
        persistentVolumeClaim: {claimName: {{ .root.Release.Name }}-data}
      - name: tmp
        emptyDir: {}
      {{- with .source }}
      - {{- merge (dict "name" "other") . | toYaml | nindent 8 }}
      {{- end }}
{{- end }}
