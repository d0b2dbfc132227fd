package server

import (
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/sandbox/handler"
)

// RuntimeHandlers is what the server needs of the sandbox manager to tell what pods
// can be run with.
type RuntimeHandlers interface {
	Handlers() []handler.Info
}

// runtimeHandlers lists the handlers that pods can be run with (KEP-585), and what they
// can do (KEP-127, KEP-3857). Those whose program is missing are in the verbose Status.
func (s *runtimeService) runtimeHandlers() []*runtimeapi.RuntimeHandler {
	var all []*runtimeapi.RuntimeHandler
	for _, h := range s.pods.Handlers() {
		if h.Problem != "" {
			continue
		}
		all = append(all, &runtimeapi.RuntimeHandler{Name: h.Name, Features: &runtimeapi.RuntimeHandlerFeatures{
			RecursiveReadOnlyMounts: h.RecursiveReadOnly,
			UserNamespaces:          h.UserNamespaces,
		}})
	}
	return all
}

// checkHandler refuses what names a runtime handler that is not configured, with the code
// that RunPodSandbox has for it. Empty is the default one.
func (s *imageService) checkHandler(name string) error {
	for _, h := range s.pods.Handlers() {
		if h.Name == name {
			return nil
		}
	}
	return errdefs.NotFound("runtime handler %q is not configured", name)
}
