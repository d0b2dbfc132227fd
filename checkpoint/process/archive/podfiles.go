package archive

import (
	"encoding/json"
	"fmt"
	"os"
)

// podOptions is pod.options: CheckpointedPodOptions of checkpointctl.
type podOptions struct {
	Version     int               `json:"version"`
	Containers  map[string]string `json:"containers"` // ID by name
	Annotations map[string]string `json:"annotations"`
}

// podDump is pod.dump, which identifies the saved pod. It follows ContainerConfig of checkpointctl.
type podDump struct {
	ID             string `json:"id"`
	Name           string `json:"name"`
	Namespace      string `json:"namespace"`
	UID            string `json:"uid"`
	RuntimeHandler string `json:"runtimeHandler"`
	CheckpointedAt string `json:"checkpointedTime"` // RFC 3339
}

// writePodFiles writes pod.options and pod.dump. berth itself does not read them.
func writePodFiles(dir *os.File, m *Manifest) error {
	created := m.CreatedAt.UTC().Format("2006-01-02T15:04:05.999999999Z07:00")
	options := podOptions{Version: 1, Containers: map[string]string{}, Annotations: map[string]string{
		"org.criu.checkpoint.engine.name":    "berth",
		"org.criu.checkpoint.engine.version": m.Node.Berth,
		"org.criu.checkpoint.pod.name":       m.Pod.Name,
		"org.criu.checkpoint.pod.id":         m.Pod.ID,
		"org.criu.checkpoint.pod.namespace":  m.Pod.Namespace,
		"org.criu.checkpoint.pod.uid":        m.Pod.UID,
		"org.criu.checkpoint.runtime.name":   m.Pod.Handler,
		"org.criu.checkpoint.criu.version":   fmt.Sprint(m.Node.CRIU),
		"org.criu.checkpoint.host.arch":      m.Node.Architecture,
		"org.criu.checkpoint.host.kernel":    m.Node.Kernel,
	}}
	for _, c := range m.Containers {
		options.Containers[c.Name] = c.ID
	}
	dump := podDump{ID: m.Pod.ID, Name: m.Pod.Name, Namespace: m.Pod.Namespace, UID: m.Pod.UID,
		RuntimeHandler: m.Pod.Handler, CheckpointedAt: created}
	for name, content := range map[string]any{PodOptionsFile: options, PodDumpFile: dump} {
		data, err := json.MarshalIndent(content, "", "  ")
		if err != nil {
			return fmt.Errorf("encode %s: %w", name, err)
		}
		if err := writeFile(dir, name, append(data, '\n')); err != nil {
			return err
		}
	}
	return nil
}
