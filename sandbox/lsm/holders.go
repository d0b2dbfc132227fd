package lsm

import (
	"strings"
	"sync"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/host"
	"berth/oci/confine"
)

// Holders knows which pods and containers use which categories. Several may use the same, if their configs ask for them by level:
// the first that goes must not give them back. The zero value has none. The lock guards the set, and what the library has of it in memory.
type Holders struct {
	mu sync.Mutex
	of map[string]map[string]bool // owners' IDs by level
}

// Draw decides the labels of a pod, or of a container, which has its pod's unless it has options of its own, and holds them. pod has
// none for a pod itself.
func (h *Holders) Draw(s SELinux, options *runtimeapi.SELinuxOption, pod confine.Labels, facts host.Facts, owner string) (confine.Labels, error) {
	labels, err := confine.NewLabels(options, pod, facts)
	if err != nil {
		return labels, err
	}
	return labels, h.Hold(s, labels, owner)
}

// Hold keeps the categories of labels from being drawn for others until all their owners have released them.
func (h *Holders) Hold(s SELinux, labels confine.Labels, owner string) error {
	if labels.Process == "" {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := s.Reserve(labels); err != nil {
		return err
	}
	level := levelOf(labels)
	if h.of == nil {
		h.of = map[string]map[string]bool{}
	}
	if h.of[level] == nil {
		h.of[level] = map[string]bool{}
	}
	h.of[level][owner] = true
	return nil
}

// Release ends an owner's use of its labels. Others may use the same: its pod, for one. It may be repeated.
func (h *Holders) Release(s SELinux, labels confine.Labels, owner string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	level := levelOf(labels)
	if owners := h.of[level]; owners[owner] {
		delete(owners, owner)
		if len(owners) == 0 {
			delete(h.of, level)
			s.Release(labels)
		}
	}
}

// levelOf is the part of a label, user:role:type:level, that has the categories.
func levelOf(labels confine.Labels) string {
	parts := strings.SplitN(labels.Process, ":", 4)
	return parts[len(parts)-1]
}
