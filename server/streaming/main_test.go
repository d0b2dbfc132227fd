package streaming

import (
	"os"
	"testing"

	"k8s.io/klog/v2"
)

// TestMain discards the log of the Kubernetes libraries: they log each connection that fails.
func TestMain(m *testing.M) {
	klog.SetLogger(klog.Logger{})
	os.Exit(m.Run())
}
