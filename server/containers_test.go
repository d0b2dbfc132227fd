package server

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image"
	"berth/internal/errdefs"
	"berth/internal/testutil"
	"berth/oci/users"
	"berth/sandbox/state"
	"berth/sandbox/stream"
)

func containerConfig(name, image string) *runtimeapi.ContainerConfig {
	return &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: name, Attempt: 2},
		Image:    &runtimeapi.ImageSpec{Image: image},
	}
}

func TestContainerCalls(t *testing.T) {
	pods := &fakePods{}
	h := start(t, testConfig, pods, &fakeImages{})
	ctx := t.Context()
	resp, err := h.runtime.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: "p1", Config: containerConfig("c", "i")})
	if err != nil || resp.ContainerId != "ctr0" {
		t.Fatalf("%v, %v", resp, err)
	}
	id := resp.ContainerId
	for _, call := range []func() error{
		func() error {
			return second(h.runtime.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: id}))
		},
		func() error {
			return second(h.runtime.StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: id, Timeout: 30}))
		},
		func() error {
			return second(h.runtime.StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: id, Timeout: math.MaxInt64}))
		},
		func() error {
			return second(h.runtime.RemoveContainer(ctx, &runtimeapi.RemoveContainerRequest{ContainerId: id}))
		},
		func() error {
			return second(h.runtime.ReopenContainerLog(ctx, &runtimeapi.ReopenContainerLogRequest{ContainerId: id}))
		},
		func() error {
			return second(h.runtime.UpdateContainerResources(ctx, &runtimeapi.UpdateContainerResourcesRequest{
				ContainerId: id, Linux: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 99}}))
		},
		func() error {
			return second(h.runtime.CheckpointContainer(ctx, &runtimeapi.CheckpointContainerRequest{ContainerId: id, Location: "/a", Timeout: 3}))
		},
		func() error {
			return second(h.runtime.CheckpointContainer(ctx, &runtimeapi.CheckpointContainerRequest{
				ContainerId: id, Location: "/a", Timeout: math.MaxInt64}))
		},
		func() error {
			return second(h.runtime.CheckpointPod(ctx, &runtimeapi.CheckpointPodRequest{PodSandboxId: "p1", OutputPath: "/d",
				ContainerIds: []string{id}, Options: map[string]string{"k": "v"}}))
		},
	} {
		if err := call(); err != nil {
			t.Error(err)
		}
	}
	want := []string{"CreateContainerp1", "StartContainerctr0", "StopContainerctr0 30s", "StopContainerctr0 " + time.Duration(math.MaxInt64).String(),
		"RemoveContainerctr0", "ReopenContainerLogctr0", "UpdateContainerResourcesctr0 99",
		"CheckpointContainerctr0 /a 3s", "CheckpointContainerctr0 /a 2562047h47m16s", "CheckpointPodp1 /d [ctr0] map[k:v]"}
	if !slices.Equal(pods.called(), want) {
		t.Errorf("calls %q\nwant  %q", pods.called(), want)
	}
	if _, err := h.runtime.StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: id, Timeout: -1}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("negative timeout: %v", err)
	}
}

func TestExecSync(t *testing.T) {
	pods := &fakePods{exec: stream.Result{Stdout: []byte("o\x00ut"), Stderr: []byte("err"), ExitCode: 7}}
	h := start(t, testConfig, pods, &fakeImages{})
	got, err := h.runtime.ExecSync(t.Context(), &runtimeapi.ExecSyncRequest{ContainerId: "c", Cmd: []string{"a", "b"}, Timeout: 5})
	want := &runtimeapi.ExecSyncResponse{Stdout: []byte("o\x00ut"), Stderr: []byte("err"), ExitCode: 7}
	if err != nil || !proto.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	if calls := pods.called(); !slices.Equal(calls, []string{"ExecSyncc [a b] 5s"}) {
		t.Errorf("calls %q", calls)
	}
}

func TestListContainersFilters(t *testing.T) {
	running, created := runtimeapi.ContainerState_CONTAINER_RUNNING, runtimeapi.ContainerState_CONTAINER_CREATED
	labelled := func(labels map[string]string) *runtimeapi.ContainerConfig {
		cfg := containerConfig("c", "i")
		cfg.Labels = labels
		return cfg
	}
	pods := &fakePods{
		pods: []*state.Pod{testPod{ID: "pod1"}.snapshot(), testPod{ID: "pod2"}.snapshot(), testPod{ID: "other"}.snapshot()},
		containers: []*state.Container{
			testContainer{ID: "aa11", PodID: "pod1", State: running, Config: labelled(map[string]string{"app": "x"})}.snapshot(),
			testContainer{ID: "aa22", PodID: "pod1", State: created, Config: labelled(map[string]string{"app": "x", "b": "2"})}.snapshot(),
			testContainer{ID: "bb33", PodID: "other", State: runtimeapi.ContainerState_CONTAINER_EXITED, Config: labelled(nil)}.snapshot(),
		},
	}
	h := start(t, testConfig, pods, &fakeImages{})
	state := func(s runtimeapi.ContainerState) *runtimeapi.ContainerStateValue {
		return &runtimeapi.ContainerStateValue{State: s}
	}
	for name, tc := range map[string]struct {
		filter *runtimeapi.ContainerFilter
		want   string
	}{
		"none":              {nil, "aa11 aa22 bb33"},
		"id":                {&runtimeapi.ContainerFilter{Id: "bb33"}, "bb33"},
		"unique prefix":     {&runtimeapi.ContainerFilter{Id: "aa1"}, "aa11"},
		"ambiguous prefix":  {&runtimeapi.ContainerFilter{Id: "aa"}, ""},
		"unknown":           {&runtimeapi.ContainerFilter{Id: "zz"}, ""},
		"pod":               {&runtimeapi.ContainerFilter{PodSandboxId: "pod1"}, "aa11 aa22"},
		"pod prefix":        {&runtimeapi.ContainerFilter{PodSandboxId: "oth"}, "bb33"},
		"ambiguous pod":     {&runtimeapi.ContainerFilter{PodSandboxId: "pod"}, ""},
		"pod without any":   {&runtimeapi.ContainerFilter{PodSandboxId: "pod2"}, ""},
		"created (state 0)": {&runtimeapi.ContainerFilter{State: state(created)}, "aa22"},
		"running":           {&runtimeapi.ContainerFilter{State: state(running)}, "aa11"},
		"labels":            {&runtimeapi.ContainerFilter{LabelSelector: map[string]string{"app": "x", "b": "2"}}, "aa22"},
		"all of them":       {&runtimeapi.ContainerFilter{Id: "aa1", PodSandboxId: "pod1", State: state(running), LabelSelector: map[string]string{"app": "x"}}, "aa11"},
		"one does not fit":  {&runtimeapi.ContainerFilter{Id: "aa1", PodSandboxId: "other"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			resp, err := h.runtime.ListContainers(t.Context(), &runtimeapi.ListContainersRequest{Filter: tc.filter})
			testutil.Must(t, err)
			if got := idsOf(resp.Containers); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

// refA is idA's reference by digest.
const refA = "docker.io/library/busybox@" + idB

// exited returns a container with all fields of its status set.
func exited() *state.Container {
	cfg := containerConfig("c", idA)
	cfg.Image.UserSpecifiedImage, cfg.Image.Annotations = "busybox:1", map[string]string{"a": "b"}
	cfg.Labels = map[string]string{"l": "1"}
	cfg.Annotations = map[string]string{"n": " kept\n"}
	cfg.Mounts = []*runtimeapi.Mount{{ContainerPath: "/data", HostPath: "/host", Readonly: true}}
	return testContainer{
		ID: "c1", PodID: "p1", Config: cfg, ImageID: idA, ImageRef: refA, State: runtimeapi.ContainerState_CONTAINER_EXITED,
		CreatedAt: time.Unix(1, 1), StartedAt: time.Unix(2, 2), FinishedAt: time.Unix(3, 3),
		ExitCode: 137, Reason: "OOMKilled", Message: "out of memory", LogPath: "/var/log/pods/x/c/2.log", PID: 0,
		User:       users.User{UID: 5, GID: 6, Groups: []uint32{6, 7}},
		Resources:  &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 1 << 20},
		StopSignal: "SIGUSR1",
	}.snapshot()
}

func TestContainerStatus(t *testing.T) {
	pods := &fakePods{containers: []*state.Container{exited(), testContainer{ID: "c2", PodID: "p1", PID: 55, Config: containerConfig("d", "busybox"), CreatedAt: time.Unix(9, 0)}.snapshot()}}
	h := start(t, testConfig, pods, &fakeImages{})
	got, err := h.runtime.ContainerStatus(t.Context(), &runtimeapi.ContainerStatusRequest{ContainerId: "c1"})
	testutil.Must(t, err)
	cfg := exited().Config
	want := &runtimeapi.ContainerStatus{
		Id: "c1", Metadata: cfg.Metadata, State: runtimeapi.ContainerState_CONTAINER_EXITED,
		CreatedAt: 1e9 + 1, StartedAt: 2e9 + 2, FinishedAt: 3e9 + 3, ExitCode: 137,
		Image:    &runtimeapi.ImageSpec{Image: "busybox:1", UserSpecifiedImage: "busybox:1", Annotations: map[string]string{"a": "b"}},
		ImageRef: refA, ImageId: idA, Reason: "OOMKilled", Message: "out of memory",
		Labels: cfg.Labels, Annotations: cfg.Annotations, Mounts: cfg.Mounts, LogPath: "/var/log/pods/x/c/2.log",
		Resources:  &runtimeapi.ContainerResources{Linux: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 1 << 20}},
		User:       exited().User.CRI(),
		StopSignal: runtimeapi.Signal_SIGNAL_SIGUSR1,
	}
	if !proto.Equal(got.Status, want) {
		t.Errorf("got  %v\nwant %v", got.Status, want)
	}
	if len(got.Info) != 0 {
		t.Errorf("info %v without verbose", got.Info)
	}

	got, err = h.runtime.ContainerStatus(t.Context(), &runtimeapi.ContainerStatusRequest{ContainerId: "c2", Verbose: true})
	testutil.Must(t, err)
	if s := got.Status; s.StartedAt != 0 || s.FinishedAt != 0 || s.Resources != nil {
		t.Errorf("a created container: %v", s)
	}
	var info containerDetail
	testutil.Must(t, json.Unmarshal([]byte(got.Info["info"]), &info))
	if info.PID != 55 || info.PodID != "p1" || !proto.Equal(info.Config, containerConfig("d", "busybox")) {
		t.Errorf("info %s", got.Info["info"])
	}
	if _, err := h.runtime.ContainerStatus(t.Context(), &runtimeapi.ContainerStatusRequest{ContainerId: "c3"}); status.Code(err) != codes.NotFound {
		t.Errorf("unknown container: %v", err)
	}

	list, err := h.runtime.ListContainers(t.Context(), &runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{Id: "c1"}})
	testutil.Must(t, err)
	item := &runtimeapi.Container{
		Id: "c1", PodSandboxId: "p1", Metadata: cfg.Metadata, Image: want.Image, ImageRef: refA, ImageId: idA, State: want.State,
		CreatedAt: 1e9 + 1, Labels: cfg.Labels, Annotations: cfg.Annotations,
	}
	if len(list.Containers) != 1 || !proto.Equal(list.Containers[0], item) {
		t.Errorf("listed %v\nwant   %v", list.Containers, item)
	}
}

func TestContainerImageName(t *testing.T) {
	named := &image.Image{ID: idA, RepoTags: []string{"docker.io/library/busybox:1", "docker.io/library/busybox:2"}}
	digested := &image.Image{ID: idB, RepoDigests: []string{"quay.io/x@" + idA}}
	for _, tc := range []struct {
		asked, user, id string
		images          []*image.Image
		want            string
	}{
		{"busybox", "", idA, nil, "busybox"},
		{idA, "busybox:1", idA, nil, "busybox:1"},
		{idA, "", idA, []*image.Image{named}, "docker.io/library/busybox:1"},
		{strings.TrimPrefix(idA, "sha256:"), "", idA, []*image.Image{named}, "docker.io/library/busybox:1"},
		{"aaaaaaaaaaaa", "", idA, []*image.Image{named}, "docker.io/library/busybox:1"},
		{idB, "", idB, []*image.Image{digested}, "quay.io/x@" + idA},
		{idA, "", idA, []*image.Image{{ID: idA}}, idA},
		{idA, "", idA, nil, idA},
		{"a", "", idA, []*image.Image{named}, "a"},
	} {
		t.Run(tc.asked+" "+tc.user+" "+tc.id, func(t *testing.T) {
			cfg := containerConfig("c", tc.asked)
			cfg.Image.UserSpecifiedImage = tc.user
			s := &runtimeService{images: &fakeImages{images: tc.images}}
			if got := s.containerImage(testContainer{Config: cfg, ImageID: tc.id}.snapshot()); got.Image != tc.want {
				t.Errorf("request %q, user's name %q: %q, want %q", tc.asked, tc.user, got.Image, tc.want)
			}
		})
	}
}

func TestImages(t *testing.T) {
	images := &fakeImages{images: []*image.Image{
		{ID: idA, RepoTags: []string{"docker.io/library/busybox:1"}, RepoDigests: []string{"docker.io/library/busybox@" + idB}, Size: 100, Pinned: true},
		{ID: idB, Size: 5},
	}}
	images.images[0].Config.User = "1000:users"
	images.images[0].Raw = []byte(`{"config": {"User": "1000:users"}, "history": [{"created_by": "RUN"}]}`)
	images.images[1].Config.User = "www"
	h := start(t, testConfig, &fakePods{}, images)
	ctx := t.Context()
	first := &runtimeapi.Image{Id: idA, RepoTags: []string{"docker.io/library/busybox:1"}, RepoDigests: []string{"docker.io/library/busybox@" + idB},
		Size: 100, Pinned: true, Uid: &runtimeapi.Int64Value{Value: 1000}, Spec: &runtimeapi.ImageSpec{Image: idA}}
	other := &runtimeapi.Image{Id: idB, Size: 5, Username: "www", Spec: &runtimeapi.ImageSpec{Image: idB}}

	for ref, want := range map[string][]*runtimeapi.Image{"": {first, other}, "docker.io/library/busybox:1": {first}, idB: {other}, "unknown": nil} {
		got, err := h.images.ListImages(ctx, &runtimeapi.ListImagesRequest{Filter: &runtimeapi.ImageFilter{Image: &runtimeapi.ImageSpec{Image: ref}}})
		if err != nil || !proto.Equal(got, &runtimeapi.ListImagesResponse{Images: want}) {
			t.Errorf("list %q: %v, %v", ref, got, err)
		}
	}
	if got, err := h.images.ListImages(ctx, &runtimeapi.ListImagesRequest{}); err != nil || len(got.Images) != 2 {
		t.Errorf("list: %v, %v", got, err)
	}

	got, err := h.images.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: &runtimeapi.ImageSpec{Image: idA}, Verbose: true})
	if err != nil || !proto.Equal(got.Image, first) {
		t.Errorf("status: %v, %v", got, err)
	}
	for _, want := range []string{`"User":"1000:users"`, `"created_by":"RUN"`} {
		if !strings.Contains(got.Info["info"], want) {
			t.Errorf("info %s lacks %s", got.Info["info"], want)
		}
	}
	got, err = h.images.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: &runtimeapi.ImageSpec{Image: "unknown"}})
	if err != nil || got.Image != nil {
		t.Errorf("status of an unknown image: %v, %v", got, err)
	}

	pulled, err := h.images.PullImage(ctx, &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: "docker.io/library/busybox:1"}})
	if err != nil || pulled.ImageRef != idA {
		t.Errorf("pull: %v, %v", pulled, err)
	}
	for handler, want := range map[string]codes.Code{"berth": codes.OK, "gone": codes.OK, "unknown": codes.NotFound} {
		spec := &runtimeapi.ImageSpec{Image: idA, RuntimeHandler: handler}
		if _, err := h.images.PullImage(ctx, &runtimeapi.PullImageRequest{Image: spec}); status.Code(err) != want {
			t.Errorf("pull for the runtime handler %q: %v", handler, err)
		}
	}
	if _, err := h.images.RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: "unknown"}}); err != nil || !slices.Equal(images.removed, []string{"unknown"}) {
		t.Errorf("remove: %v, %q", err, images.removed)
	}

	fs, err := h.images.ImageFsInfo(ctx, &runtimeapi.ImageFsInfoRequest{})
	if err != nil || len(fs.ImageFilesystems) != 1 {
		t.Fatalf("ImageFsInfo: %v, %v", fs, err)
	}
	if u := fs.ImageFilesystems[0]; u.Timestamp <= 0 || u.FsId.Mountpoint != "/var/lib/berth/images" || u.UsedBytes.Value != 7 || u.InodesUsed.Value != 3 {
		t.Errorf("ImageFsInfo: %v", u)
	}
	if len(fs.ContainerFilesystems) != 1 {
		t.Fatalf("ImageFsInfo: %v", fs)
	}
	if u := fs.ContainerFilesystems[0]; u.FsId.Mountpoint != "/writable" || u.UsedBytes.Value != 41 || u.InodesUsed.Value != 42 || u.Timestamp != time.Unix(7, 8).UnixNano() {
		t.Errorf("ImageFsInfo: %v", u)
	}
}

func TestImageErrors(t *testing.T) {
	images := &fakeImages{err: fmt.Errorf("pull x: %w", errdefs.Unavailable("RegistryUnavailable: down"))}
	h := start(t, testConfig, &fakePods{}, images)
	ctx, spec := t.Context(), &runtimeapi.ImageSpec{Image: "x"}
	for name, err := range map[string]error{
		"pull":   second(h.images.PullImage(ctx, &runtimeapi.PullImageRequest{Image: spec})),
		"status": second(h.images.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: spec})),
		"list":   second(h.images.ListImages(ctx, &runtimeapi.ListImagesRequest{Filter: &runtimeapi.ImageFilter{Image: spec}})),
		"remove": second(h.images.RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: spec})),
		"fs":     second(h.images.ImageFsInfo(ctx, &runtimeapi.ImageFsInfoRequest{})),
	} {
		if s := status.Convert(err); s.Code() != codes.Unavailable || s.Message() != "pull x: RegistryUnavailable: down" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestImageUser(t *testing.T) {
	uid := func(n int64) *runtimeapi.Int64Value { return &runtimeapi.Int64Value{Value: n} }
	for user, want := range map[string]struct {
		uid  *runtimeapi.Int64Value
		name string
	}{
		"": {}, ":": {}, ":5": {}, "0": {uid: uid(0)}, "1000": {uid: uid(1000)}, "1000:1000": {uid: uid(1000)}, "1000:users": {uid: uid(1000)},
		"root": {name: "root"}, "www:www": {name: "www"}, "4294967296": {uid: uid(1 << 32)},
		"+0": {name: "+0"}, "-0": {name: "-0"}, "0x0": {name: "0x0"}, " 0": {name: " 0"},
		"99999999999999999999": {name: "99999999999999999999"},
	} {
		t.Run(user, func(t *testing.T) {
			gotUID, gotName := imageUser(user)
			if !proto.Equal(gotUID, want.uid) || gotName != want.name {
				t.Errorf("USER %q: %v, %q", user, gotUID, gotName)
			}
		})
	}
}
