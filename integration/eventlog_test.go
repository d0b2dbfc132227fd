package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

// eventsOf returns the log lines of an event. It fails the test unless it finds n lines, all at
// level info.
func eventsOf(t *testing.T, d *harness.Daemon, n int, event string, want harness.LogLine) []harness.LogLine {
	t.Helper()
	var found []harness.LogLine
	for _, line := range d.LogLines(t) {
		matches := line["msg"] == event && line["level"] == "INFO"
		for key, value := range want {
			matches = matches && line[key] == value
		}
		if matches {
			found = append(found, line)
		}
	}
	if len(found) != n {
		t.Fatalf("the log has %d lines %q with %v, want %d:\n%s", len(found), event, map[string]string(want), n, d.Tail())
	}
	return found
}

// wantKeys fails the test unless a line has values for these keys.
func wantKeys(t *testing.T, line harness.LogLine, keys ...string) {
	t.Helper()
	for _, key := range keys {
		if line[key] == "" {
			t.Errorf("no %s in %s", key, line)
		}
	}
}

// Each event of a pod, container or image is one line at level info, with names. Normal operation
// logs no warning.
func TestEventLog(t *testing.T) {
	d := harness.StartDaemon(t)
	name, id := harness.Push(t, harness.Registry, "eventlog:1", harness.BuildImage(t, v1.Config{}))
	d.Pull(t, name)
	d.Pull(t, name)
	pulled := eventsOf(t, d, 2, "image pulled", harness.LogLine{"ref": name, "image": id, "host": harness.Registry.Host})
	wantKeys(t, pulled[0], "size", "seconds")
	if pulled[0]["bytes"] == "0" || pulled[1]["bytes"] != "0" {
		t.Errorf("bytes of the first pull are %s, of the second %s", pulled[0]["bytes"], pulled[1]["bytes"])
	}

	pod := d.RunPod(t, harness.PodNamed("web"))
	names := harness.LogLine{"namespace": pod.Config.Metadata.Namespace, "podName": "web", "pod": pod.Id, "attempt": "0"}
	ready := eventsOf(t, d, 1, "pod ready", names)
	wantKeys(t, ready[0], "seconds")
	harness.Equal(t, "ips", ready[0]["ips"], "["+pod.Ip(t)+"]")

	limit := harness.Resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes = 16 << 20 })
	for what, c := range map[string]struct {
		options           []harness.ContainerOption
		code, reason, oom string
	}{
		"well":   {[]harness.ContainerOption{harness.Script("exit 0")}, "0", "Completed", "false"},
		"failed": {[]harness.ContainerOption{harness.Script("exit 3")}, "3", "Error", "false"},
		"hog":    {[]harness.ContainerOption{limit, harness.Command("tail", "/dev/zero")}, "137", "OOMKilled", "true"},
	} {
		ctr, _ := pod.RunToEnd(t, append(c.options, harness.ContainerNamed(what))...)
		its := harness.LogLine{"containerName": what, "container": ctr.Id, "attempt": "0", "namespace": names["namespace"], "podName": "web", "pod": pod.Id}
		wantKeys(t, eventsOf(t, d, 1, "container started", its)[0], "pid")
		its["code"], its["reason"], its["oom"] = c.code, c.reason, c.oom
		wantKeys(t, eventsOf(t, d, 1, "container exited", its)[0], "seconds")
	}
	running := pod.Run(t)
	d.Restart(t) // the next daemon logs no events for existing pods
	running.Stop(t, 0)
	pod.Stop(t)
	pod.Stop(t)
	pod.Remove(t)
	eventsOf(t, d, 1, "pod ready", harness.LogLine{"pod": pod.Id})
	eventsOf(t, d, 4, "container started", harness.LogLine{"pod": pod.Id})
	eventsOf(t, d, 4, "container exited", harness.LogLine{"pod": pod.Id})
	eventsOf(t, d, 1, "pod stopped", names)
	eventsOf(t, d, 1, "pod removed", names)
	harness.Must(t, d.Images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: name}))
	harness.Must(t, d.Images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: name})) // already removed
	eventsOf(t, d, 1, "image removed", harness.LogLine{"image": id, "tags": "[" + name + "]"})
	d.QuietLog(t)
}

// Names may contain any text. Each event is still one line that can be parsed. The log contains no
// credentials.
func TestEventLogOfHostileNames(t *testing.T) {
	const hostile = "a\u2028 level=ERROR msg=\"forged\" \u202e time=now" // control characters are refused
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.PodNamed(hostile), harness.HostNetwork)
	pod.RunToEnd(t, harness.ContainerNamed("c"+hostile), harness.Script("exit 0"), func(c *runtimeapi.ContainerConfig) { c.LogPath = "" })
	line := eventsOf(t, d, 1, "pod ready", harness.LogLine{"pod": pod.Id})[0]
	if strings.ContainsAny(line["podName"], "\u2028\u202e") || !strings.Contains(line["podName"], "forged") {
		t.Errorf("the pod's name is %q", line["podName"])
	}
	pod.Remove(t)
	for _, line := range d.LogLines(t) {
		if line["msg"] == "forged" {
			t.Errorf("forged line in the log: %s", line)
		}
	}
	d.QuietLog(t)

	inJSON := harness.StartDaemon(t, harness.WithConfig(`log.format = "json"`))
	pod = inJSON.RunPod(t, harness.PodNamed(hostile), harness.HostNetwork)
	pod.Remove(t)
	found := 0
	for text := range strings.Lines(string(harness.Get(os.ReadFile(inJSON.LogFile()))(t))) {
		var line map[string]any
		harness.Must(t, json.Unmarshal([]byte(text), &line))
		if line["msg"] == "pod ready" && line["pod"] == pod.Id {
			found++
		}
	}
	harness.Equal(t, "lines of the pod that is ready", found, 1)
}

// A call that its client cancels causes no warning in the log. Neither does the stop of a pod while
// one of its containers starts.
func TestCanceledCallsLogNoWarning(t *testing.T) {
	d := harness.StartDaemon(t)
	d.EnsureImage(t, harness.BaseImage)
	pod := d.RunPod(t, harness.HostNetwork)
	running := pod.Run(t)
	soon := func(do func(ctx context.Context)) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); do(ctx) }()
		time.AfterFunc(20*time.Millisecond, cancel)
		<-done
		cancel()
	}
	for range 5 {
		config := d.PodConfig(t, harness.HostNetwork)
		soon(func(ctx context.Context) { _, _ = d.Cri.RunPodSandbox(ctx, config, "") })
		c := pod.Create(t)
		soon(func(ctx context.Context) { _ = d.Cri.StartContainer(ctx, c.Id) })
		soon(func(ctx context.Context) { _, _, _ = d.Cri.ExecSync(ctx, running.Id, []string{"sleep", "1000"}, 0) })
		soon(func(ctx context.Context) { _ = d.Cri.StopContainer(ctx, running.Id, 3600) })
		id := harness.Get(d.Cri.RunPodSandbox(t.Context(), config, ""))(t)
		harness.Must(t, d.Cri.StopPodSandbox(t.Context(), id))
		harness.Must(t, d.Cri.RemovePodSandbox(t.Context(), id))
	}
	for range 10 { // the start begins before, during, or after the stop
		other := d.RunPod(t, harness.HostNetwork)
		c := other.Create(t)
		started := make(chan struct{})
		go func() { defer close(started); _ = d.Cri.StartContainer(t.Context(), c.Id) }()
		other.Stop(t)
		<-started
		other.Remove(t)
	}
	pod.Remove(t)
	d.QuietLog(t)
}

// The log never contains pull credentials, whether the pull succeeds or fails.
func TestNoCredentialsInTheLog(t *testing.T) {
	r := harness.NewRegistry(t)
	d := harness.StartDaemon(t)
	name, _ := harness.Push(t, r, "private:1", harness.BuildImage(t, v1.Config{}))
	r.Hook(harness.BasicAuth)
	for _, auth := range []*runtimeapi.AuthConfig{{Username: "user", Password: "secret"}, {Username: "user", Password: "hunter2"}} {
		_, _ = d.Images.PullImage(t.Context(), &runtimeapi.ImageSpec{Image: name}, auth, nil)
	}
	log := string(harness.Get(os.ReadFile(d.LogFile()))(t))
	harness.WantNoText(t, "log", log, "secret", "hunter2", "dXNlcj")
	eventsOf(t, d, 1, "image pulled", harness.LogLine{"ref": name, "host": r.Host})
}

// Each line with the ID of a pod or container, and each error that a client gets, has kubelet's
// names.
func TestLogAndErrorsHaveNames(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.PodNamed("web"), harness.HostNetwork)
	c := pod.Create(t, harness.ContainerNamed("app"), harness.Command("/missing"))
	title := "pod " + pod.Config.Metadata.Namespace + "/web: "
	err := d.Cri.StartContainer(t.Context(), c.Id)
	harness.WantText(t, "error of StartContainer", fmt.Sprint(err), title, "app")
	_, _, err = d.Cri.ExecSync(t.Context(), c.Id, []string{"true"}, 0)
	harness.WantText(t, "error of ExecSync", fmt.Sprint(err), title+"container app: exec in container "+c.Id)
	_, err = d.Cri.CreateContainer(t.Context(), pod.Id, &runtimeapi.ContainerConfig{Metadata: &runtimeapi.ContainerMetadata{Name: "none"},
		Image: &runtimeapi.ImageSpec{Image: "none.example/x"}}, pod.Config)
	harness.WantText(t, "error of CreateContainer", fmt.Sprint(err), title, `container "none"`)
	pod.Remove(t)
	lines := 0
	for _, line := range d.LogLines(t) {
		if strings.Contains(line.String(), pod.Id) || strings.Contains(line.String(), c.Id) {
			lines++
			wantKeys(t, line, "namespace", "podName")
		}
		if strings.Contains(line.String(), c.Id) {
			wantKeys(t, line, "containerName")
		}
	}
	if lines < 10 {
		t.Errorf("%d lines of the log concern the pod", lines)
	}
}

// calledLine finds method, time taken and code in the daemon's log of a call.
var calledLine = regexp.MustCompile(`msg=(\w+) .*took=(\S+) code=(\w+)`)

// wasAsked reports whether a client has called a method.
func wasAsked(d *harness.Daemon, method string) bool {
	return slices.ContainsFunc(machine.ReadLines(d.LogFile()), func(line string) bool { return strings.Contains(line, "msg="+method+" ") })
}

// durations returns the sorted durations of all calls of a method so far.
func durations(t *testing.T, d *harness.Daemon, method string) []time.Duration {
	t.Helper()
	var all []time.Duration
	for _, line := range machine.ReadLines(d.LogFile()) {
		if m := calledLine.FindStringSubmatch(line); m != nil && m[1] == method {
			all = append(all, harness.Get(time.ParseDuration(m[2]+"s"))(t))
		}
	}
	if len(all) == 0 {
		t.Fatalf("the daemon's log has no line for %s", method)
	}
	slices.Sort(all)
	return all
}

// failedCalls returns the failed calls in the daemon's log. It leaves out NotFound, because kubelet
// asks for the status of objects that it has just removed.
func failedCalls(d *harness.Daemon) []string {
	var all []string
	for _, line := range machine.ReadLines(d.LogFile()) {
		if m := calledLine.FindStringSubmatch(line); m != nil && m[3] != "OK" && m[3] != "NotFound" {
			all = append(all, line)
		}
	}
	return all
}
