package server

import (
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/sandbox/handler"
)

// RuntimeHandlers is the part of the sandbox manager that describes runtime handlers.
type RuntimeHandlers interface {
	Handlers() []handler.Info
}

// runtimeHandlers lists the available runtime handlers (KEP-585) with their features (KEP-127,
// KEP-3857). Handlers with a missing program are shown only in verbose Status.
func (s *runtimeService) runtimeHandlers() []*runtimeapi.RuntimeHandler {
	var all []*runtimeapi.RuntimeHandler
	for _, h := range s.pods.Handlers() {
		if h.Problem != "" {
			continue
		}
		all = append(all, &runtimeapi.RuntimeHandler{Name: h.Name, Features: &runtimeapi.RuntimeHandlerFeatures{
			RecursiveReadOnlyMounts: h.RecursiveReadOnly,
			UserNamespaces:          h.UserNamespaces,
			CgroupNamespaces:        h.CgroupNamespaces,
		}})
	}
	return all
}

// checkHandler refuses a runtime handler that is not configured, with the same code as
// RunPodSandbox. "" is the default handler.
func (s *imageService) checkHandler(name string) error {
	for _, h := range s.pods.Handlers() {
		if h.Name == name {
			return nil
		}
	}
	return errdefs.NotFound("runtime handler %q is not configured", name)
}
