package server

import (
	"encoding/json"
	"errors"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cni"
	"berth/image/pull"
	"berth/internal/task"
	"berth/internal/testutil"
	"berth/internal/trace"
	"berth/sandbox/state"
)

func TestVersion(t *testing.T) {
	h := start(t, testConfig, &fakePods{}, &fakeImages{})
	got, err := h.runtime.Version(t.Context(), &runtimeapi.VersionRequest{Version: "0.1.0"})
	testutil.Must(t, err)
	want := &runtimeapi.VersionResponse{Version: "0.1.0", RuntimeName: "berth", RuntimeVersion: "1.2.3", RuntimeApiVersion: "v1"}
	if !proto.Equal(got, want) {
		t.Errorf("got %v", got)
	}
}

func TestRuntimeConfigNamesTheDriver(t *testing.T) {
	for systemd, want := range map[bool]runtimeapi.CgroupDriver{true: runtimeapi.CgroupDriver_SYSTEMD, false: runtimeapi.CgroupDriver_CGROUPFS} {
		t.Run(want.String(), func(t *testing.T) {
			cfg := testConfig
			cfg.SystemdCgroup = systemd
			h := start(t, cfg, &fakePods{}, &fakeImages{})
			got, err := h.runtime.RuntimeConfig(t.Context(), &runtimeapi.RuntimeConfigRequest{})
			testutil.Must(t, err)
			if got.Linux == nil || got.Linux.CgroupDriver != want {
				t.Errorf("systemd %t: %v", systemd, got)
			}
		})
	}
}

func TestUpdateRuntimeConfig(t *testing.T) {
	pods := &fakePods{}
	h := start(t, testConfig, pods, &fakeImages{})
	for _, cidr := range []string{"10.1.0.0/24,fd00::/64", ""} {
		req := &runtimeapi.UpdateRuntimeConfigRequest{RuntimeConfig: &runtimeapi.RuntimeConfig{NetworkConfig: &runtimeapi.NetworkConfig{PodCidr: cidr}}}
		if _, err := h.runtime.UpdateRuntimeConfig(t.Context(), req); err != nil {
			t.Errorf("%q: %v", cidr, err)
		}
	}
	if _, err := h.runtime.UpdateRuntimeConfig(t.Context(), &runtimeapi.UpdateRuntimeConfigRequest{}); err != nil {
		t.Error(err)
	}
	if want := []string{"UpdatePodCIDR10.1.0.0/24,fd00::/64"}; !slices.Equal(pods.called(), want) {
		t.Errorf("the manager was called with %q", pods.called())
	}
}

func TestStatus(t *testing.T) {
	pods := &fakePods{network: errors.New("no network configuration in /etc/cni/net.d")}
	h := start(t, testConfig, pods, &fakeImages{})
	got, err := h.runtime.Status(t.Context(), &runtimeapi.StatusRequest{})
	testutil.Must(t, err)
	features := &runtimeapi.RuntimeHandlerFeatures{RecursiveReadOnlyMounts: true}
	want := &runtimeapi.StatusResponse{
		Status: &runtimeapi.RuntimeStatus{Conditions: []*runtimeapi.RuntimeCondition{
			{Type: "RuntimeReady", Status: true},
			{Type: "NetworkReady", Reason: "NetworkPluginNotReady", Message: "no network configuration in /etc/cni/net.d"},
		}},
		RuntimeHandlers: []*runtimeapi.RuntimeHandler{{Name: "", Features: features}, {Name: "berth", Features: features}},
		Features:        &runtimeapi.RuntimeFeatures{SupplementalGroupsPolicy: true, MountOptions: true},
	}
	if !proto.Equal(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}

	pods.network = nil
	got, err = h.runtime.Status(t.Context(), &runtimeapi.StatusRequest{})
	testutil.Must(t, err)
	want.Status.Conditions[1] = &runtimeapi.RuntimeCondition{Type: "NetworkReady", Status: true}
	if !proto.Equal(got, want) {
		t.Errorf("with a network: got  %v\nwant %v", got, want)
	}
}

func TestStatusVerbose(t *testing.T) {
	pods := &fakePods{waits: []task.Wait{{What: "kill", Object: "container c1", Since: time.Now().Add(-time.Minute)}}}
	images := &fakeImages{progress: []pull.Progress{{Ref: "docker.io/library/busybox:latest"}}}
	cfg := testConfig
	cfg.Network = func() cni.Info { return cni.Info{File: "/etc/cni/net.d/10-net.conflist", Network: "net"} }
	h := start(t, cfg, pods, images)
	got, err := h.runtime.Status(t.Context(), &runtimeapi.StatusRequest{Verbose: true})
	testutil.Must(t, err)
	var waits []waitInfo
	var pulls []struct{ Ref string }
	var settings, versions map[string]any
	var driver string
	var network cni.Info
	for key, v := range map[string]any{"waits": &waits, "pulls": &pulls, "config": &settings, "versions": &versions, "cgroupDriver": &driver, "network": &network} {
		if err := json.Unmarshal([]byte(got.Info[key]), v); err != nil {
			t.Errorf("%s: %q: %v", key, got.Info[key], err)
		}
	}
	if len(waits) != 1 || waits[0].What != "kill" || waits[0].Object != "container c1" || waits[0].Seconds < 60 {
		t.Errorf("waits %+v", waits)
	}
	if len(pulls) != 1 || pulls[0].Ref != "docker.io/library/busybox:latest" {
		t.Errorf("pulls %+v", pulls)
	}
	if network.File != "/etc/cni/net.d/10-net.conflist" || network.Network != "net" {
		t.Errorf("network %+v", network)
	}
	if settings["max_log_line"] != 42. || versions["berth"] != "1.2.3" || driver != "cgroupfs" {
		t.Errorf("config %v, versions %v, driver %s", settings, versions, driver)
	}
}

// A request without a required field does not reach the manager, and the error names the field.
func TestRequiredFields(t *testing.T) {
	pods, images := &fakePods{}, &fakeImages{}
	h := start(t, testConfig, pods, images)
	ctx := t.Context()
	for _, tc := range []struct {
		missing string
		call    func() error
	}{
		{"config", func() error { return second(h.runtime.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{})) }},
		{"config.metadata", func() error {
			return second(h.runtime.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: &runtimeapi.PodSandboxConfig{}}))
		}},
		{"config.metadata.name", func() error {
			return second(h.runtime.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Namespace: "n"}}}))
		}},
		{"pod_sandbox_id", func() error { return second(h.runtime.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{})) }},
		{"pod_sandbox_id", func() error { return second(h.runtime.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{})) }},
		{"pod_sandbox_id", func() error { return second(h.runtime.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{})) }},
		{"pod_sandbox_id", func() error {
			return second(h.runtime.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{Config: containerConfig("c", "i")}))
		}},
		{"config", func() error {
			return second(h.runtime.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: "p"}))
		}},
		{"config.metadata", func() error {
			return second(h.runtime.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: "p", Config: &runtimeapi.ContainerConfig{}}))
		}},
		{"config.metadata.name", func() error {
			return second(h.runtime.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: "p", Config: containerConfig("", "i")}))
		}},
		{"config.image.image", func() error {
			return second(h.runtime.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: "p", Config: containerConfig("c", "")}))
		}},
		{"container_id", func() error { return second(h.runtime.StartContainer(ctx, &runtimeapi.StartContainerRequest{})) }},
		{"container_id", func() error { return second(h.runtime.StopContainer(ctx, &runtimeapi.StopContainerRequest{})) }},
		{"container_id", func() error { return second(h.runtime.RemoveContainer(ctx, &runtimeapi.RemoveContainerRequest{})) }},
		{"container_id", func() error { return second(h.runtime.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{})) }},
		{"container_id", func() error {
			return second(h.runtime.UpdateContainerResources(ctx, &runtimeapi.UpdateContainerResourcesRequest{}))
		}},
		{"linux", func() error {
			return second(h.runtime.UpdateContainerResources(ctx, &runtimeapi.UpdateContainerResourcesRequest{ContainerId: "c"}))
		}},
		{"container_id", func() error {
			return second(h.runtime.ReopenContainerLog(ctx, &runtimeapi.ReopenContainerLogRequest{}))
		}},
		{"container_id", func() error {
			return second(h.runtime.CheckpointContainer(ctx, &runtimeapi.CheckpointContainerRequest{Location: "/a"}))
		}},
		{"location", func() error {
			return second(h.runtime.CheckpointContainer(ctx, &runtimeapi.CheckpointContainerRequest{ContainerId: "c"}))
		}},
		{"pod_sandbox_id", func() error {
			return second(h.runtime.CheckpointPod(ctx, &runtimeapi.CheckpointPodRequest{OutputPath: "/a", ContainerIds: []string{"c"}}))
		}},
		{"output_path", func() error {
			return second(h.runtime.CheckpointPod(ctx, &runtimeapi.CheckpointPodRequest{PodSandboxId: "p", ContainerIds: []string{"c"}}))
		}},
		{"container_ids", func() error {
			return second(h.runtime.CheckpointPod(ctx, &runtimeapi.CheckpointPodRequest{PodSandboxId: "p", OutputPath: "/a"}))
		}},
		{"container_id", func() error { return second(h.runtime.ExecSync(ctx, &runtimeapi.ExecSyncRequest{Cmd: []string{"a"}})) }},
		{"cmd", func() error { return second(h.runtime.ExecSync(ctx, &runtimeapi.ExecSyncRequest{ContainerId: "c"})) }},
		{"image.image", func() error { return second(h.images.PullImage(ctx, &runtimeapi.PullImageRequest{})) }},
		{"image.image", func() error {
			return second(h.images.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: &runtimeapi.ImageSpec{}}))
		}},
		{"image.image", func() error { return second(h.images.RemoveImage(ctx, &runtimeapi.RemoveImageRequest{})) }},
	} {
		t.Run(tc.missing, func(t *testing.T) {
			s := status.Convert(tc.call())
			if s.Code() != codes.InvalidArgument || s.Message() != tc.missing+" is required" {
				t.Errorf("%s missing: %v", tc.missing, s)
			}
		})
	}
	if calls := pods.called(); len(calls) > 0 || len(images.removed) > 0 {
		t.Errorf("reached the manager or the store: %q %q", calls, images.removed)
	}
}

func second[T any](_ T, err error) error { return err }

func podConfig(name string, labels map[string]string) *runtimeapi.PodSandboxConfig {
	return &runtimeapi.PodSandboxConfig{
		Metadata:    &runtimeapi.PodSandboxMetadata{Name: name, Namespace: "ns", Uid: "uid-" + name, Attempt: 3},
		Labels:      labels,
		Annotations: map[string]string{"note/" + name: " kept \n byte for byte\t"},
	}
}

func TestRunAndListPods(t *testing.T) {
	pods := &fakePods{}
	h := start(t, testConfig, pods, &fakeImages{})
	resp, err := h.runtime.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: podConfig("a", map[string]string{"l": "1"}), RuntimeHandler: "berth"})
	testutil.Must(t, err)
	list, err := h.runtime.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{})
	testutil.Must(t, err)
	want := &runtimeapi.ListPodSandboxResponse{Items: []*runtimeapi.PodSandbox{{
		Id: resp.PodSandboxId, Metadata: podConfig("a", nil).Metadata, State: runtimeapi.PodSandboxState_SANDBOX_READY, CreatedAt: time.Second.Nanoseconds(),
		Labels: map[string]string{"l": "1"}, Annotations: podConfig("a", nil).Annotations, RuntimeHandler: "berth",
	}}}
	if !proto.Equal(list, want) {
		t.Errorf("got  %v\nwant %v", list, want)
	}
	for _, call := range []func() error{
		func() error {
			return second(h.runtime.StopPodSandbox(t.Context(), &runtimeapi.StopPodSandboxRequest{PodSandboxId: "p1"}))
		},
		func() error {
			return second(h.runtime.RemovePodSandbox(t.Context(), &runtimeapi.RemovePodSandboxRequest{PodSandboxId: "p2"}))
		},
	} {
		if err := call(); err != nil {
			t.Error(err)
		}
	}
	if want := []string{"RunPodSandbox", "StopPodSandboxp1", "RemovePodSandboxp2"}; !slices.Equal(pods.called(), want) {
		t.Errorf("calls %q", pods.called())
	}
}

func TestListPodSandboxFilters(t *testing.T) {
	ready, notReady := runtimeapi.PodSandboxState_SANDBOX_READY, runtimeapi.PodSandboxState_SANDBOX_NOTREADY
	pods := &fakePods{pods: []*state.Pod{
		testPod{ID: "aa11", Ready: true, Config: podConfig("1", map[string]string{"app": "x", "tier": "front"})}.snapshot(),
		testPod{ID: "aa22", Ready: false, Config: podConfig("2", map[string]string{"app": "x"})}.snapshot(),
		testPod{ID: "bb33", Ready: true, Config: podConfig("3", map[string]string{"empty": ""})}.snapshot(),
		testPod{ID: "bb", Ready: true, Config: podConfig("4", nil)}.snapshot(),
	}}
	h := start(t, testConfig, pods, &fakeImages{})
	state := func(s runtimeapi.PodSandboxState) *runtimeapi.PodSandboxStateValue {
		return &runtimeapi.PodSandboxStateValue{State: s}
	}
	for name, tc := range map[string]struct {
		filter *runtimeapi.PodSandboxFilter
		want   string
	}{
		"none":                {nil, "aa11 aa22 bb33 bb"},
		"empty":               {&runtimeapi.PodSandboxFilter{}, "aa11 aa22 bb33 bb"},
		"id":                  {&runtimeapi.PodSandboxFilter{Id: "aa11"}, "aa11"},
		"unique prefix":       {&runtimeapi.PodSandboxFilter{Id: "aa2"}, "aa22"},
		"ambiguous prefix":    {&runtimeapi.PodSandboxFilter{Id: "aa"}, ""},
		"id and prefix":       {&runtimeapi.PodSandboxFilter{Id: "bb"}, "bb"},
		"unknown id":          {&runtimeapi.PodSandboxFilter{Id: "cc"}, ""},
		"longer than any":     {&runtimeapi.PodSandboxFilter{Id: "aa111"}, ""},
		"ready (state 0)":     {&runtimeapi.PodSandboxFilter{State: state(ready)}, "aa11 bb33 bb"},
		"not ready":           {&runtimeapi.PodSandboxFilter{State: state(notReady)}, "aa22"},
		"label":               {&runtimeapi.PodSandboxFilter{LabelSelector: map[string]string{"app": "x"}}, "aa11 aa22"},
		"labels are ANDed":    {&runtimeapi.PodSandboxFilter{LabelSelector: map[string]string{"app": "x", "tier": "front"}}, "aa11"},
		"missing label":       {&runtimeapi.PodSandboxFilter{LabelSelector: map[string]string{"empty": "x"}}, ""},
		"empty value":         {&runtimeapi.PodSandboxFilter{LabelSelector: map[string]string{"empty": ""}}, "bb33"},
		"id, state and label": {&runtimeapi.PodSandboxFilter{Id: "aa1", State: state(ready), LabelSelector: map[string]string{"app": "x"}}, "aa11"},
		"contradiction":       {&runtimeapi.PodSandboxFilter{Id: "aa1", State: state(notReady)}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			resp, err := h.runtime.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{Filter: tc.filter})
			testutil.Must(t, err)
			if got := idsOf(resp.Items); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

func TestPodSandboxStatus(t *testing.T) {
	options := &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER, Ipc: runtimeapi.NamespaceMode_NODE}
	cfg := podConfig("a", map[string]string{"l": "1"})
	cfg.Linux = &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: options}}
	pods := &fakePods{
		pods: []*state.Pod{
			testPod{ID: "p1", Config: cfg, Handler: "berth", CreatedAt: time.Unix(5, 6), Ready: true, IPs: []string{"10.0.0.2", "fd00::2", "fd00::3"}, NetNS: "/run/netns/berth-p1", PausePID: 77}.snapshot(),
			testPod{ID: "p2", Config: podConfig("b", nil)}.snapshot(),
		},
		containers: []*state.Container{
			testContainer{ID: "c0", PodID: "p1", Config: containerConfig("c", "i"), ImageID: idA}.snapshot(),
			testContainer{ID: "c1", PodID: "p1", Config: containerConfig("c", "i"), ImageID: idA}.snapshot(),
			testContainer{ID: "c2", PodID: "p2", Config: containerConfig("c", "i")}.snapshot(),
		},
	}
	pods.traces = []trace.Operation{{Monotonic: 5, Spans: []trace.Shown{{Name: "RunPodSandbox", Took: 9}}}}
	h := start(t, testConfig, pods, &fakeImages{})

	before := time.Now().UnixNano()
	got, err := h.runtime.PodSandboxStatus(t.Context(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: "p1"})
	testutil.Must(t, err)
	want := &runtimeapi.PodSandboxStatus{
		Id: "p1", Metadata: cfg.Metadata, State: runtimeapi.PodSandboxState_SANDBOX_READY, CreatedAt: 5e9 + 6,
		Network: &runtimeapi.PodSandboxNetworkStatus{Ip: "10.0.0.2", AdditionalIps: []*runtimeapi.PodIP{{Ip: "fd00::2"}, {Ip: "fd00::3"}}},
		Linux:   &runtimeapi.LinuxPodSandboxStatus{Namespaces: &runtimeapi.Namespace{Options: options}},
		Labels:  cfg.Labels, Annotations: cfg.Annotations, RuntimeHandler: "berth",
	}
	if !proto.Equal(got.Status, want) {
		t.Errorf("got  %v\nwant %v", got.Status, want)
	}
	if s := got.ContainersStatuses; len(s) != 2 || s[0].Id != "c1" || s[1].Id != "c0" || got.Timestamp < before || len(got.Info) != 0 {
		t.Errorf("containers %v, timestamp %d, info %v", got.ContainersStatuses, got.Timestamp, got.Info)
	}

	got, err = h.runtime.PodSandboxStatus(t.Context(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: "p1", Verbose: true})
	testutil.Must(t, err)
	var info podDetail
	testutil.Must(t, json.Unmarshal([]byte(got.Info["info"]), &info))
	if got.Info["trace"] != `[{"began":"0001-01-01T00:00:00Z","monotonic":5,"spans":[{"name":"RunPodSandbox","depth":0,"from":0,"took":9}]}]` {
		t.Errorf("trace %s", got.Info["trace"])
	}
	if info.PID != 77 || info.NetNS != "/run/netns/berth-p1" || info.RuntimeHandler != "berth" || !proto.Equal(info.Config, cfg) {
		t.Errorf("info %s", got.Info["info"])
	}

	got, err = h.runtime.PodSandboxStatus(t.Context(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: "p2"})
	testutil.Must(t, err)
	if s := got.Status; s.State != runtimeapi.PodSandboxState_SANDBOX_NOTREADY || s.Network == nil || s.Network.Ip != "" || s.Linux.GetNamespaces().GetOptions() == nil {
		t.Errorf("a stopped pod without anything: %v", s)
	}
	if _, err := h.runtime.PodSandboxStatus(t.Context(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: "p3"}); status.Code(err) != codes.NotFound {
		t.Errorf("unknown pod: %v", err)
	}
}
