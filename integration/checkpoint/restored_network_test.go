package checkpoint

import (
	"fmt"
	"io"
	"net/http"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/integration/harness"
)

// serving runs a web server at the pod's own address.
func serving(t *testing.T, pod *harness.Pod) *harness.Container {
	t.Helper()
	c := pod.Run(t, harness.Script("mkdir /srv && hostname >/srv/name && exec httpd -f -p "+pod.Ip(t)+":8000 -h /srv"))
	harness.EventuallyTrue(t, "it listens", func() bool { return fetch(pod.Ip(t)) != "" })
	return c
}

// fetch asks the web server at an address. It returns "" after an error.
func fetch(ip string) string {
	response, err := http.Get(fmt.Sprintf("http://%s:8000/name", ip))
	if err != nil {
		return ""
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK {
		return ""
	}
	return string(body)
}

// With the built-in network a restored pod gets its old address if that is free. A checkpoint of
// another node cannot choose one.
func TestRestoredAddress(t *testing.T) {
	d := startDaemon(t, harness.WithBuiltInNetwork())
	pod := d.RunPod(t)
	address := pod.Ip(t)
	c := serving(t, pod)
	s := save(t, pod, c)
	t.Run("used", func(t *testing.T) {
		restored, list := restorePod(t, d, s.identity(t))
		if got := restored.Ip(t); got == address || got == "" {
			t.Errorf("address %q beside the original with %q", got, address)
		}
		// The server listens at an address that this pod does not have.
		harness.WantCode(t, d.Cri.StartContainer(t.Context(), list[0].Id), codes.FailedPrecondition, "Cannot assign requested address")
		restored.Remove(t)
	})
	want := fetch(address)
	pod.Remove(t)
	t.Run("free", func(t *testing.T) {
		for range 2 {
			restored, list := restorePod(t, d, s.identity(t))
			harness.Equal(t, "address", restored.Ip(t), address)
			other := d.RunPod(t)
			if other.Ip(t) == address {
				t.Error("another pod has the same address")
			}
			d.Kill(t) // the next daemon starts and removes the pod with what was recorded
			d.Start(t)
			list[0].Start(t)
			harness.Equal(t, "answer", fetch(address), want)
			restored.Remove(t)
			other.Remove(t)
		}
	})

}

// With other plugins a restored pod has an address of its own, too.
func TestRestoredAddressOfPlugins(t *testing.T) {
	d := startDaemon(t)
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script("mkdir /srv && hostname >/srv/name && exec httpd -f -p 0.0.0.0:8000 -h /srv"))
	harness.EventuallyTrue(t, "it listens", func() bool { return fetch(pod.Ip(t)) != "" })
	want := fetch(pod.Ip(t))
	s := save(t, pod, c)
	restored, list := restorePod(t, d, s.identity(t))
	list[0].Start(t)
	harness.Equal(t, "answer", fetch(restored.Ip(t)), want)
	if restored.Ip(t) == pod.Ip(t) {
		t.Error("both pods have the same address")
	}
	restored.Remove(t)
	pod.Remove(t)
}
