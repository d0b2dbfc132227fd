package archive

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path"
	"strings"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// ContainerFiles is the content of a container's files for other programs.
type ContainerFiles struct {
	Spec        *specs.Spec       // as the launcher got it; WriteContainer does not change it
	Labels      map[string]string // of the CRI's ContainerConfig
	Annotations map[string]string // of the CRI's ContainerConfig
	CreatedAt   time.Time         // of the container
	Status      json.RawMessage   // ContainerStatus of the CRI, as protojson
	IP          string            // of the pod; empty: none
}

// containerConfig is config.dump: ContainerConfig of checkpointctl.
type containerConfig struct {
	ID              string    `json:"id"`
	Name            string    `json:"name"`
	RootfsImage     string    `json:"rootfsImage,omitempty"`
	RootfsImageRef  string    `json:"rootfsImageRef,omitempty"` // CRI-O accepts only 64 hex digits
	RootfsImageName string    `json:"rootfsImageName,omitempty"`
	OCIRuntime      string    `json:"runtime,omitempty"`
	CreatedTime     time.Time `json:"createdTime"`
	CheckpointedAt  time.Time `json:"checkpointedTime"`
	RestoredAt      time.Time `json:"restoredTime"`
	Restored        bool      `json:"restored"`
}

// WriteContainer writes config.dump, spec.dump and status.dump of a container into its directory in
// the archive. pod is the container's pod, also in an archive without a pod.
func WriteContainer(dir *os.File, m *Manifest, pod Pod, c *Container, f ContainerFiles) error {
	name := c.Image.Ref
	if name == "" {
		name = c.Image.Name
	}
	config := containerConfig{ID: c.ID, Name: c.Name, RootfsImage: c.Image.Name, RootfsImageName: name,
		RootfsImageRef: strings.TrimPrefix(c.Image.ID, "sha256:"), OCIRuntime: pod.Handler,
		CreatedTime: f.CreatedAt, CheckpointedAt: m.CreatedAt}
	spec := *f.Spec
	var err error
	if spec.Annotations, err = annotate(f, pod, c); err != nil {
		return err
	}
	files := map[string]any{ConfigFile: config, SpecFile: spec, StatusFile: f.Status}
	for name, content := range files {
		data, err := json.MarshalIndent(content, "", "  ")
		if err != nil {
			return fmt.Errorf("encode %s: %w", name, err)
		}
		if err := writeFile(dir, path.Join(m.Dir(c), name), append(data, '\n')); err != nil {
			return fmt.Errorf("write %s of container %s: %w", name, c.ID, err)
		}
	}
	return nil
}

// annotate returns the annotations of spec.dump. checkpointctl prints them in the format that CRI-O
// uses. CRI-O restores a container only if its annotations are there.
func annotate(f ContainerFiles, pod Pod, c *Container) (map[string]string, error) {
	all := map[string]string{
		"io.container.manager":                "cri-o",
		"io.kubernetes.cri-o.ContainerType":   "container",
		"io.kubernetes.cri-o.ContainerID":     c.ID,
		"io.kubernetes.cri-o.SandboxID":       pod.ID,
		"io.kubernetes.cri-o.Created":         f.CreatedAt.UTC().Format(time.RFC3339Nano),
		"io.kubernetes.cri-o.ImageName":       c.Image.Name,
		"io.kubernetes.cri-o.RuntimeHandler":  pod.Handler,
		"io.kubernetes.pod.name":              pod.Name,
		"io.kubernetes.pod.namespace":         pod.Namespace,
		"io.kubernetes.pod.uid":               pod.UID,
		"io.kubernetes.container.name":        c.Name,
		"io.kubernetes.cri.container-type":    "container",
		"io.kubernetes.cri.container-name":    c.Name,
		"io.kubernetes.cri.image-name":        c.Image.Name,
		"io.kubernetes.cri.sandbox-id":        pod.ID,
		"io.kubernetes.cri.sandbox-name":      pod.Name,
		"io.kubernetes.cri.sandbox-namespace": pod.Namespace,
		"io.kubernetes.cri.sandbox-uid":       pod.UID,
	}
	if f.IP != "" {
		all["io.kubernetes.cri-o.IP.0"] = f.IP
	}
	metadata := map[string]any{"name": c.Name, "attempt": c.Attempt}
	documents := map[string]any{"Metadata": metadata, "Labels": notNil(f.Labels), "Annotations": notNil(f.Annotations)}
	for name, content := range documents {
		data, err := json.Marshal(content)
		if err != nil {
			return nil, fmt.Errorf("encode annotation %s: %w", name, err)
		}
		all["io.kubernetes.cri-o."+name] = string(data)
	}
	maps.Copy(all, f.Spec.Annotations) // annotations that berth sets for a runtime
	return all, nil
}

func notNil(m map[string]string) map[string]string {
	if m == nil {
		return map[string]string{}
	}
	return m
}
