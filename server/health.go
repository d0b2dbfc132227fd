package server

import (
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Health reports whether pods can be run.
type Health interface {
	// RuntimeStatus returns the error that prevents pods from running at present, or nil. It
	// answers from memory.
	RuntimeStatus() error
}

// runtimeReady returns the condition RuntimeReady, which determines the node's readiness. It is
// false if berth's directories are not writable. Then no container can start, and kubelet cannot
// repair that. A full disk does not count, because kubelet frees space.
func (s *runtimeService) runtimeReady() *runtimeapi.RuntimeCondition {
	ready := &runtimeapi.RuntimeCondition{Type: runtimeapi.RuntimeReady, Status: true}
	if err := s.pods.RuntimeStatus(); err != nil {
		ready.Status, ready.Reason, ready.Message = false, "FilesystemNotWritable", err.Error()
	}
	return ready
}
