package server

import (
	"context"
	"encoding/json"
	"errors"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image"
	"berth/internal/errdefs"
	"berth/internal/testutil"
)

// fuzzStream feeds one request to a streaming handler and drops the answers.
type fuzzStream struct {
	decode func(any) error
	ctx    context.Context
}

func (s fuzzStream) SetHeader(metadata.MD) error  { return nil }
func (s fuzzStream) SendHeader(metadata.MD) error { return nil }
func (s fuzzStream) SetTrailer(metadata.MD)       {}
func (s fuzzStream) Context() context.Context     { return s.ctx }
func (s fuzzStream) SendMsg(any) error            { return nil }
func (s fuzzStream) RecvMsg(m any) error          { return s.decode(m) }

var errNoMessage = errors.New("not a request")

// rpc is one RPC of the two services, called without interceptors, so that a panic ends the test.
type rpc struct {
	name string
	call func(decode func(any) error) error
}

func allRPCs(cfg Config, pods Sandboxes, images Images) []rpc {
	var all []rpc
	gone, cancel := context.WithCancel(context.Background())
	cancel() // endless streams end at once
	add := func(desc *grpc.ServiceDesc, impl any) {
		for _, m := range desc.Methods {
			all = append(all, rpc{m.MethodName, func(decode func(any) error) error {
				_, err := m.Handler(impl, context.Background(), decode, nil)
				return err
			}})
		}
		for _, s := range desc.Streams {
			all = append(all, rpc{s.StreamName, func(decode func(any) error) error {
				return s.Handler(impl, fuzzStream{decode, gone})
			}})
		}
	}
	add(runtimeServiceDesc(), &runtimeService{cfg: cfg, stopping: context.Background(), pods: pods, images: images})
	add(&runtimeapi.ImageService_ServiceDesc, &imageService{images: images, pods: pods})
	return all
}

// FuzzRPC sends arbitrary bytes to every RPC. Then it reads the effect on the fake backend through
// all reading RPCs.
func FuzzRPC(f *testing.F) {
	seeds := []proto.Message{
		&runtimeapi.RunPodSandboxRequest{Config: podConfig("a", map[string]string{"l": "1"})},
		&runtimeapi.RunPodSandboxRequest{Config: &runtimeapi.PodSandboxConfig{Linux: &runtimeapi.LinuxPodSandboxConfig{}}},
		&runtimeapi.CreateContainerRequest{PodSandboxId: "pod0", Config: exited().Config},
		&runtimeapi.ListPodSandboxRequest{Filter: &runtimeapi.PodSandboxFilter{Id: "p", State: &runtimeapi.PodSandboxStateValue{State: 99}}},
		&runtimeapi.StopContainerRequest{ContainerId: "c", Timeout: -1},
		&runtimeapi.ExecSyncRequest{ContainerId: "c", Cmd: []string{""}, Timeout: 1 << 62},
		&runtimeapi.UpdateContainerResourcesRequest{ContainerId: "c", Linux: &runtimeapi.LinuxContainerResources{Unified: map[string]string{"": ""}}},
		&runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: idA}, Auth: &runtimeapi.AuthConfig{Auth: "x"}},
		&runtimeapi.UpdateRuntimeConfigRequest{RuntimeConfig: &runtimeapi.RuntimeConfig{NetworkConfig: &runtimeapi.NetworkConfig{PodCidr: "x"}}},
		&runtimeapi.StatusRequest{Verbose: true},
	}
	cfg := withEvents(f, testConfig)
	for i := range allRPCs(cfg, nil, nil) {
		f.Add(uint8(i), []byte{})
		f.Add(uint8(i), []byte{0xff, 0x01})
		for _, msg := range seeds {
			data, err := proto.Marshal(msg)
			testutil.Must(f, err)
			f.Add(uint8(i), data)
		}
	}
	f.Fuzz(func(t *testing.T, which uint8, data []byte) {
		pods := &fakePods{}
		config, err := json.Marshal(ocispec.Image{Author: string(data)})
		testutil.Must(t, err)
		images := &fakeImages{profiles: emptyProfiles(t), images: []*image.Image{{ID: idA, RepoTags: []string{"x"}, Raw: config}}}
		rpcs := allRPCs(cfg, pods, images)
		r := rpcs[int(which)%len(rpcs)]
		err = r.call(func(m any) error {
			if proto.Unmarshal(data, m.(proto.Message)) != nil {
				return errNoMessage
			}
			return nil
		})
		if errors.Is(err, errNoMessage) {
			return // grpc answers it
		}
		check(t, r.name, err)
		readBack(t, &runtimeService{cfg: cfg, stopping: context.Background(), pods: pods, images: images})
	})
}

// check fails the test for an answer that is invalid for a client. The fake manager never fails, so
// each error must come from the request.
func check(t *testing.T, name string, err error) {
	t.Helper()
	code, text := status.Code(coded(err)), status.Convert(err).Message()
	if canceled := code == codes.Canceled && name == "GetContainerEvents"; !canceled && !errdefs.Allowed(name, code, text) { // by us: it has no end
		t.Errorf("%s: code %s does not fit: %v", name, code, err)
	}
}

// read decodes an answer like a client.
func read(t *testing.T, answer encoded, as proto.Message) {
	t.Helper()
	testutil.Must(t, proto.Unmarshal(mem.BufferSlice(answer).Materialize(), as))
}

func readBack(t *testing.T, s *runtimeService) {
	t.Helper()
	ctx := context.Background()
	list, err := s.encodedPods(nil)
	check(t, "ListPodSandbox", err)
	var pods runtimeapi.ListPodSandboxResponse
	read(t, list, &pods)
	for _, p := range pods.Items {
		if _, err := s.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: p.Id, Verbose: true}); err != nil {
			t.Errorf("status of a pod that is listed: %v", err)
		}
	}
	list, err = s.encodedContainers(nil)
	check(t, "ListContainers", err)
	var containers runtimeapi.ListContainersResponse
	read(t, list, &containers)
	for _, c := range containers.Containers {
		if _, err := s.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: c.Id, Verbose: true}); err != nil {
			t.Errorf("status of a container that is listed: %v", err)
		}
	}
}
