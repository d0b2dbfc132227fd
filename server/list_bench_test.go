package server

import (
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image"
	"berth/internal/testutil"
	"berth/sandbox/state"
)

// kubeletContainer returns a container with kubelet's labels and annotations.
func kubeletContainer(i int) *state.Container {
	id := fmt.Sprintf("%064x", i)
	return testContainer{
		ID: id, PodID: fmt.Sprintf("%064x", i/2), State: runtimeapi.ContainerState_CONTAINER_RUNNING,
		ImageID: "sha256:" + id, ImageRef: "registry.example/app@sha256:" + id, CreatedAt: time.Unix(int64(i), 0), StartedAt: time.Unix(int64(i), 1), LogPath: "/var/log/pods/" + id,
		Listed: new(state.Answer),
		Config: &runtimeapi.ContainerConfig{
			Metadata: &runtimeapi.ContainerMetadata{Name: "main"},
			Image:    &runtimeapi.ImageSpec{Image: "sha256:" + id, UserSpecifiedImage: "registry.example/main:1"},
			Labels: map[string]string{
				"io.kubernetes.container.name": "main", "io.kubernetes.pod.name": fmt.Sprintf("pod-%d", i),
				"io.kubernetes.pod.namespace": "default", "io.kubernetes.pod.uid": "cdd05b5e-ee94-4cb5-8e2d-42a0b0b1a2c3",
			},
			Annotations: map[string]string{
				"io.kubernetes.container.hash": "8e2d42a0", "io.kubernetes.container.restartCount": "0",
				"io.kubernetes.container.terminationMessagePath":   "/dev/termination-log",
				"io.kubernetes.container.terminationMessagePolicy": "File", "io.kubernetes.pod.terminationGracePeriod": "30",
			},
		},
	}.snapshot()
}

// A list from cached items equals the first list. Exceptions are a changed container, and a
// container whose request named the image by ID, which gets a present name.
func TestListsReuseEncodedItems(t *testing.T) {
	pods, images := &fakePods{}, &fakeImages{}
	for i := range 3 {
		c := kubeletContainer(i)
		pods.containers = append(pods.containers, c)
		pods.pods = append(pods.pods, testPod{ID: c.ID, Listed: new(state.Answer), Ready: true, Config: &runtimeapi.PodSandboxConfig{
			Metadata: &runtimeapi.PodSandboxMetadata{Name: "pod", Namespace: "default", Uid: c.ID}, Labels: c.Config.Labels}}.snapshot())
	}
	named := pods.containers[1]
	named.Config.Image.UserSpecifiedImage = ""
	h := start(t, testConfig, pods, images)
	list := func() (*runtimeapi.ListContainersResponse, *runtimeapi.ListPodSandboxResponse) {
		t.Helper()
		containers, err := h.runtime.ListContainers(t.Context(), &runtimeapi.ListContainersRequest{})
		testutil.Must(t, err)
		sandboxes, err := h.runtime.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{})
		testutil.Must(t, err)
		return containers, sandboxes
	}
	containers, sandboxes := list()
	for i, c := range pods.containers {
		if got := containers.Containers[i]; got.Id != c.ID || got.State != c.State() || got.Labels["io.kubernetes.pod.name"] != c.Config.Labels["io.kubernetes.pod.name"] {
			t.Errorf("container %d is listed as %v", i, got)
		}
		if got := sandboxes.Items[i]; got.Id != c.ID || got.State != runtimeapi.PodSandboxState_SANDBOX_READY {
			t.Errorf("pod %d is listed as %v", i, got)
		}
	}
	if again, podsAgain := list(); !proto.Equal(again, containers) || !proto.Equal(podsAgain, sandboxes) {
		t.Errorf("the second lists are %v and %v", again, podsAgain)
	}
	exited := exitedNow(kubeletContainer(2))
	pods.containers[2] = exited
	pods.pods[2] = testPod{ID: pods.pods[2].ID, Config: pods.pods[2].Config, Listed: new(state.Answer)}.snapshot()
	images.images = append(images.images, &image.Image{ID: named.Image.ID, RepoTags: []string{"registry.example/other:2"}})
	containers, sandboxes = list()
	if got := containers.Containers[2].State; got != exited.State() {
		t.Errorf("a container that has exited is listed as %v", got)
	}
	if got := sandboxes.Items[2].State; got != runtimeapi.PodSandboxState_SANDBOX_NOTREADY {
		t.Errorf("a pod without pause is listed as %v", got)
	}
	if got := containers.Containers[1].Image.Image; got != "registry.example/other:2" {
		t.Errorf("an image that got a name is listed as %q", got)
	}
}

// streamContainers returns the items of StreamContainers.
func streamContainers(tb testing.TB, h *harness, filter *runtimeapi.ContainerFilter) (all []*runtimeapi.Container) {
	tb.Helper()
	stream, err := h.runtime.StreamContainers(tb.Context(), &runtimeapi.StreamContainersRequest{Filter: filter})
	if err != nil {
		tb.Fatal(err)
	}
	for {
		answer, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			tb.Fatal(err)
		}
		all = append(all, answer.Containers...)
	}
}

// A list in batches has the same items as the list, with filters too.
func TestListsInBatchesEqualLists(t *testing.T) {
	const count = 3000 // their size exceeds batchBytes
	pods := &fakePods{}
	for i := range count {
		c := kubeletContainer(i)
		if i%3 == 0 {
			c = exitedNow(c)
		}
		pods.containers = append(pods.containers, c)
		pods.pods = append(pods.pods, testPod{ID: c.ID, Listed: new(state.Answer), Ready: i%2 == 0, Config: &runtimeapi.PodSandboxConfig{
			Metadata: &runtimeapi.PodSandboxMetadata{Name: "pod", Namespace: "default", Uid: c.ID}, Labels: c.Config.Labels}}.snapshot())
	}
	h := start(t, testConfig, pods, &fakeImages{})
	id := pods.containers[7].ID
	for name, tt := range map[string]struct {
		filter *runtimeapi.ContainerFilter
		want   int
	}{
		"all":    {nil, count},
		"exited": {&runtimeapi.ContainerFilter{State: &runtimeapi.ContainerStateValue{State: runtimeapi.ContainerState_CONTAINER_EXITED}}, count / 3},
		"by ID":  {&runtimeapi.ContainerFilter{Id: id}, 1},
		"label":  {&runtimeapi.ContainerFilter{LabelSelector: map[string]string{"io.kubernetes.pod.name": "pod-7"}}, 1},
		"none":   {&runtimeapi.ContainerFilter{Id: "unknown"}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			list, err := h.runtime.ListContainers(t.Context(), &runtimeapi.ListContainersRequest{Filter: tt.filter})
			testutil.Must(t, err)
			streamed := &runtimeapi.ListContainersResponse{Containers: streamContainers(t, h, tt.filter)}
			if len(list.Containers) != tt.want || !proto.Equal(list, streamed) {
				t.Errorf("%s: %d containers listed, %d streamed, want %d, the same", name, len(list.Containers), len(streamed.Containers), tt.want)
			}
		})
	}
	ready := &runtimeapi.PodSandboxFilter{State: &runtimeapi.PodSandboxStateValue{State: runtimeapi.PodSandboxState_SANDBOX_READY}}
	list, err := h.runtime.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{Filter: ready})
	testutil.Must(t, err)
	stream, err := h.runtime.StreamPodSandboxes(t.Context(), &runtimeapi.StreamPodSandboxesRequest{Filter: ready})
	testutil.Must(t, err)
	streamed := &runtimeapi.ListPodSandboxResponse{}
	for {
		answer, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		testutil.Must(t, err)
		streamed.Items = append(streamed.Items, answer.PodSandboxes...)
	}
	if len(list.Items) != count/2 || !proto.Equal(list, streamed) {
		t.Errorf("%d pods listed, %d streamed want %d, the same", len(list.Items), len(streamed.Items), count/2)
	}
}

// BenchmarkListContainers1000 lists 1000 containers over the socket to a client like kubelet, and
// looks up one of them. The CPU time includes that of the client, which runs in this process.
func BenchmarkListContainers1000(b *testing.B) {
	const count = 1000
	pods := &fakePods{}
	for i := range count {
		pods.containers = append(pods.containers, kubeletContainer(i))
	}
	h := start(b, testConfig, pods, &fakeImages{})
	var answer []byte
	b.Run("list", func(b *testing.B) {
		measureCPU(b, func() {
			list, err := h.runtime.ListContainers(b.Context(), &runtimeapi.ListContainersRequest{})
			if err != nil || len(list.Containers) != count {
				b.Fatalf("%d containers, %v", len(list.GetContainers()), err)
			}
			if answer == nil {
				answer, err = proto.Marshal(list)
				testutil.Must(b, err)
			}
		})
	})
	b.Run("stream", func(b *testing.B) {
		measureCPU(b, func() {
			if streamed := streamContainers(b, h, nil); len(streamed) != count {
				b.Fatalf("%d containers", len(streamed))
			}
		})
	})
	b.Run("client", func(b *testing.B) { // the client's part of list
		measureCPU(b, func() {
			testutil.Must(b, proto.Unmarshal(answer, &runtimeapi.ListContainersResponse{}))
		})
	})
	b.Run("status", func(b *testing.B) {
		id := pods.containers[count/2].ID
		measureCPU(b, func() {
			if _, err := h.runtime.ContainerStatus(b.Context(), &runtimeapi.ContainerStatusRequest{ContainerId: id}); err != nil {
				b.Fatal(err)
			}
		})
	})
}
