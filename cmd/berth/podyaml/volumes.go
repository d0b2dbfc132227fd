package podyaml

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

const (
	configMapKind = "ConfigMap"
	secretKind    = "Secret"

	defaultFileMode = 0o644
	maxFileMode     = 0o777
)

// File is a file of a volume that has its content from the manifest.
type File struct {
	Path    string // relative, without ..
	Content []byte
	Mode    int32
}

// HasFiles reports whether VolumeFiles returns the content of the volume.
func HasFiles(v *corev1.Volume) bool {
	return v.ConfigMap != nil || v.Secret != nil || v.DownwardAPI != nil || v.Projected != nil
}

// VolumeFiles returns the files of a configMap, secret, downwardAPI or projected volume. A later
// file replaces an earlier one with the same path.
func (p *Plan) VolumeFiles(v *corev1.Volume) ([]File, error) {
	switch s := &v.VolumeSource; {
	case s.ConfigMap != nil:
		return p.keyFiles(configMapKind, s.ConfigMap.Name, s.ConfigMap.Items, s.ConfigMap.DefaultMode, s.ConfigMap.Optional)
	case s.Secret != nil:
		return p.keyFiles(secretKind, s.Secret.SecretName, s.Secret.Items, s.Secret.DefaultMode, s.Secret.Optional)
	case s.DownwardAPI != nil:
		return p.downwardFiles(s.DownwardAPI.Items, s.DownwardAPI.DefaultMode)
	case s.Projected != nil:
		return p.projectedFiles(s.Projected)
	}
	return nil, nil
}

func (p *Plan) projectedFiles(projected *corev1.ProjectedVolumeSource) ([]File, error) {
	var out []File
	mode := projected.DefaultMode
	for i := range projected.Sources {
		var files []File
		var err error
		switch s := &projected.Sources[i]; {
		case s.ConfigMap != nil:
			files, err = p.keyFiles(configMapKind, s.ConfigMap.Name, s.ConfigMap.Items, mode, s.ConfigMap.Optional)
		case s.Secret != nil:
			files, err = p.keyFiles(secretKind, s.Secret.Name, s.Secret.Items, mode, s.Secret.Optional)
		case s.DownwardAPI != nil:
			files, err = p.downwardFiles(s.DownwardAPI.Items, mode)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", index("sources", i), err)
		}
		out = append(out, files...)
	}
	return out, nil
}

// keyFiles returns the keys of a ConfigMap or Secret as files: all, or only the items.
func (p *Plan) keyFiles(kind, name string, items []corev1.KeyToPath, mode *int32, optional *bool) ([]File, error) {
	data, ok := p.Objects.lookup(kind, p.Pod.Namespace, name)
	if !ok && !value(optional) {
		return nil, missingObject(kind, name)
	}
	if len(items) == 0 {
		var out []File
		for _, key := range slices.Sorted(maps.Keys(data)) {
			out = append(out, File{key, data[key], fileMode(nil, mode)})
		}
		return out, nil
	}
	var out []File
	for _, item := range items {
		content, ok := data[item.Key]
		switch {
		case ok:
			out = append(out, File{item.Path, content, fileMode(item.Mode, mode)})
		case !value(optional):
			return nil, missingKey(kind, name, item.Key)
		}
	}
	return out, nil
}

func (p *Plan) downwardFiles(items []corev1.DownwardAPIVolumeFile, mode *int32) ([]File, error) {
	var out []File
	for i, item := range items {
		text, err := p.downwardText(item)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", index("items", i), err)
		}
		out = append(out, File{item.Path, []byte(text), fileMode(item.Mode, mode)})
	}
	return out, nil
}

func (p *Plan) downwardText(item corev1.DownwardAPIVolumeFile) (string, error) {
	switch {
	case item.ResourceFieldRef != nil:
		return p.resourceValue(nil, item.ResourceFieldRef)
	case item.FieldRef == nil:
		return "", errors.New("has no source")
	}
	switch item.FieldRef.FieldPath {
	case "metadata.labels":
		return formatMap(p.Pod.Labels), nil
	case "metadata.annotations":
		return formatMap(p.Pod.Annotations), nil
	}
	return p.fieldValue(item.FieldRef.FieldPath, nil)
}

// formatMap formats labels or annotations as kubelet does, one quoted value a line (FormatMap).
func formatMap(m map[string]string) string {
	lines := make([]string, 0, len(m))
	for _, key := range slices.Sorted(maps.Keys(m)) {
		lines = append(lines, fmt.Sprintf("%s=%q", key, m[key]))
	}
	return strings.Join(lines, "\n")
}

func fileMode(own, common *int32) int32 {
	switch {
	case own != nil:
		return *own
	case common != nil:
		return *common
	}
	return defaultFileMode
}

func missingObject(kind, name string) error {
	return fmt.Errorf("the manifest has no %s %q; add it to the file, or mark it optional", kind, name)
}

func missingKey(kind, name, key string) error {
	return fmt.Errorf("%s %q has no key %q", kind, name, key)
}
