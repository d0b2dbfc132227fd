package server

import (
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Health is what the server needs to tell whether pods can be run.
type Health interface {
	// RuntimeStatus tells why no pod can be run at the moment, or nil. It answers from memory.
	RuntimeStatus() error
}

// runtimeReady is the condition RuntimeReady, with which the node is. It is false where
// berth's directories cannot be written to: nothing can be started then, and nothing that kubelet does helps. A
// disk that is full is no such case, since kubelet makes room on it.
func (s *runtimeService) runtimeReady() *runtimeapi.RuntimeCondition {
	ready := &runtimeapi.RuntimeCondition{Type: runtimeapi.RuntimeReady, Status: true}
	if err := s.pods.RuntimeStatus(); err != nil {
		ready.Status, ready.Reason, ready.Message = false, "FilesystemNotWritable", err.Error()
	}
	return ready
}
