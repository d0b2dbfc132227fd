package server

import (
	"errors"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/testutil"
)

func (f *fakePods) RuntimeStatus() error { return f.runtime }

func TestRuntimeReady(t *testing.T) {
	pods := &fakePods{}
	h := start(t, testConfig, pods, &fakeImages{})
	for _, failure := range []error{nil, errors.New("/var/lib/berth cannot be written to"), nil} {
		pods.runtime = failure
		resp, err := h.runtime.Status(t.Context(), &runtimeapi.StatusRequest{})
		testutil.Must(t, err)
		c := resp.Status.Conditions[0]
		if c.Type != runtimeapi.RuntimeReady || c.Status != (failure == nil) {
			t.Errorf("with error %v the condition is %v", failure, c)
		}
		if failure != nil && (c.Reason != "FilesystemNotWritable" || c.Message != failure.Error()) {
			t.Errorf("with error %v the condition is %v", failure, c)
		}
	}
}
