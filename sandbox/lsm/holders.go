package lsm

import (
	"strings"
	"sync"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/host"
	"berth/oci/confine"
)

// Holders records which pods and containers use which SELinux categories. Pods whose configs
// request the same level share categories, and the first removed pod must not release them. The
// zero value is empty. The lock guards the map and the library's set in memory.
type Holders struct {
	mu sync.Mutex
	// +checklocks:mu
	owners map[string]map[string]bool // set of owner IDs by level
}

// Draw chooses and reserves the labels of a pod or container. A container without SELinux options
// gets the labels of its pod. For a pod, pod is empty.
func (h *Holders) Draw(s SELinux, options *runtimeapi.SELinuxOption, pod confine.Labels, facts host.Facts,
	owner string) (confine.Labels, error) {
	labels, err := confine.NewLabels(options, pod, facts)
	if err != nil {
		return labels, err
	}
	return labels, h.Hold(s, labels, owner)
}

// Hold reserves the categories of labels until all their owners have released them.
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
	if h.owners == nil {
		h.owners = map[string]map[string]bool{}
	}
	if h.owners[level] == nil {
		h.owners[level] = map[string]bool{}
	}
	h.owners[level][owner] = true
	return nil
}

// Release ends an owner's use of its labels. Other owners may still use them. It may be repeated.
func (h *Holders) Release(s SELinux, labels confine.Labels, owner string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	level := levelOf(labels)
	if owners := h.owners[level]; owners[owner] {
		delete(owners, owner)
		if len(owners) == 0 {
			delete(h.owners, level)
			s.Release(labels)
		}
	}
}

// levelOf returns the part of a label, user:role:type:level, that contains the categories.
func levelOf(labels confine.Labels) string {
	parts := strings.SplitN(labels.Process, ":", 4)
	return parts[len(parts)-1]
}
