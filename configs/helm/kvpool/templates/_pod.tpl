{{- /* Where a pod may run, and what pulls its image: of the values of one part, and of all. */}}
{{- define "kvpool.placement" }}
{{- with .all.imagePullSecrets }}
imagePullSecrets: {{ toRawJson . }}
{{- end }}
{{- with .part.nodeSelector }}
nodeSelector: {{ toRawJson . }}
{{- end }}
{{- with .part.tolerations }}
tolerations: {{ toRawJson . }}
{{- end }}
{{- end }}
