package integration

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"berth/integration/harness"
)

// A node that is a container (kind, LXC, nspawn) restarts without a new boot ID. As after a reboot,
// a pod with restartPolicy Never has failed. A pod with restartPolicy Always runs again, with its
// last state and its old log.
func TestKubeletNodeRestartInTheSameBoot(t *testing.T) {
	n := startNode(t, "")
	never := n.apply(t, "never", `
restartPolicy: Never
containers:
- command: [sh, -c, 'echo it runs; sleep 100000']
`)
	always := n.apply(t, "always", `
terminationGracePeriodSeconds: 0
containers:
- command: [sh, -c, 'echo the first; sleep 100000']
`)
	never.awaitReady(t)
	always.awaitReady(t)
	n.stop(t)
	parents := n.d.Parents
	n.d.Parents = append(parents, n.cgroup()) // kills kubelet's processes, too
	n.d.LosePower(t)
	n.d.Parents = parents
	n.d.Start(t)
	n.start(t)

	end := terminated(never.awaitPhase(t, corev1.PodFailed), "main")
	if end == nil || end.ExitCode != 255 || end.Reason != "Unknown" {
		t.Errorf("the container with restartPolicy Never ended with %+v", end)
	}
	pod := always.await(t, "the pod runs again", func(pod *corev1.Pod) error {
		if s := containerStatus(pod, "main"); s.RestartCount == 0 || s.State.Running == nil {
			return fmt.Errorf("the container is %+v", s)
		}
		return ready(pod)
	})
	last := containerStatus(pod, "main").LastTerminationState.Terminated
	if last == nil || last.ExitCode != 255 || last.Reason != "Unknown" {
		t.Errorf("its last state is %+v", last)
	}
	harness.Equal(t, "its previous log", previousLog(t, always.name), "the first\n")
}

// previousLog returns a container's output before its restart, like kubectl logs --previous.
func previousLog(t *testing.T, pod string) string {
	t.Helper()
	client := http.Client{Timeout: harness.Patience, Transport: &http.Transport{DisableKeepAlives: true,
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}} // kubelet signs its certificate itself
	answer := harness.Get(client.Get("https://" + net.JoinHostPort(kubeletAddress, "10250") + "/containerLogs/default/" + pod + "/main?previous=true"))(t)
	defer answer.Body.Close()
	return string(harness.Get(io.ReadAll(io.LimitReader(answer.Body, 1<<20)))(t))
}
