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
	for _, trouble := range []error{nil, errors.New("/var/lib/berth cannot be written to"), nil} {
		pods.runtime = trouble
		resp, err := h.runtime.Status(t.Context(), &runtimeapi.StatusRequest{})
		testutil.Must(t, err)
		c := resp.Status.Conditions[0]
		if c.Type != runtimeapi.RuntimeReady || c.Status != (trouble == nil) {
			t.Errorf("with trouble %v the condition is %v", trouble, c)
		}
		if trouble != nil && (c.Reason != "FilesystemNotWritable" || c.Message != trouble.Error()) {
			t.Errorf("with trouble %v the condition is %v", trouble, c)
		}
	}
}
