package server

import (
	"context"
	"slices"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/sandbox/state"
)

// RunPodSandbox implements RuntimeService.
func (s *runtimeService) RunPodSandbox(ctx context.Context,
	req *runtimeapi.RunPodSandboxRequest) (*runtimeapi.RunPodSandboxResponse, error) {
	metadata := req.GetConfig().GetMetadata()
	if err := need(
		field{"config", req.GetConfig() != nil},
		field{"config.metadata", metadata != nil},
		field{"config.metadata.name", metadata.GetName() != ""},
		field{"config.metadata.namespace", metadata.GetNamespace() != ""},
	); err != nil {
		return nil, err
	}
	id, err := s.pods.RunPodSandbox(ctx, req.GetConfig(), req.GetRuntimeHandler())
	if err != nil {
		return nil, err
	}
	return &runtimeapi.RunPodSandboxResponse{PodSandboxId: id}, nil
}

// StopPodSandbox implements RuntimeService.
func (s *runtimeService) StopPodSandbox(ctx context.Context,
	req *runtimeapi.StopPodSandboxRequest) (*runtimeapi.StopPodSandboxResponse, error) {
	if err := need(field{"pod_sandbox_id", req.GetPodSandboxId() != ""}); err != nil {
		return nil, err
	}
	if err := s.pods.StopPodSandbox(ctx, req.GetPodSandboxId()); err != nil {
		return nil, err
	}
	return &runtimeapi.StopPodSandboxResponse{}, nil
}

// RemovePodSandbox implements RuntimeService.
func (s *runtimeService) RemovePodSandbox(ctx context.Context,
	req *runtimeapi.RemovePodSandboxRequest) (*runtimeapi.RemovePodSandboxResponse, error) {
	if err := need(field{"pod_sandbox_id", req.GetPodSandboxId() != ""}); err != nil {
		return nil, err
	}
	if err := s.pods.RemovePodSandbox(ctx, req.GetPodSandboxId()); err != nil {
		return nil, err
	}
	return &runtimeapi.RemovePodSandboxResponse{}, nil
}

// PodSandboxStatus implements RuntimeService.
func (s *runtimeService) PodSandboxStatus(_ context.Context,
	req *runtimeapi.PodSandboxStatusRequest) (*runtimeapi.PodSandboxStatusResponse, error) {
	if err := need(field{"pod_sandbox_id", req.GetPodSandboxId() != ""}); err != nil {
		return nil, err
	}
	// kubelet uses the later one of a status and an event (KEP-3386). The timestamp is therefore
	// taken before the status, so that a concurrent change does not seem older.
	timestamp := time.Now().UnixNano()
	pod, err := s.pods.Pod(req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	resp := &runtimeapi.PodSandboxStatusResponse{
		Status:             podStatus(pod),
		ContainersStatuses: s.containerStatuses(pod.ID),
		Timestamp:          timestamp,
	}
	if req.GetVerbose() {
		resp.Info, err = infoMap(map[string]any{"trace": s.pods.StartOf(pod.ID), "info": podDetail{
			PID: pod.PausePID, NetNS: pod.NetNS, RuntimeHandler: pod.Handler, Config: pod.ShownConfig(),
		}})
		if err != nil {
			return nil, err
		}
	}
	return resp, nil
}

// podDetail is the additional part of verbose PodSandboxStatus. It uses the names of other runtimes
// for users of crictl.
type podDetail struct {
	PID            int                          `json:"pid"`
	NetNS          string                       `json:"networkNamespace,omitempty"`
	RuntimeHandler string                       `json:"runtimeHandler"`
	Config         *runtimeapi.PodSandboxConfig `json:"config"`
}

// listPodSandbox implements ListPodSandbox, see encodedLists.
func (s *runtimeService) listPodSandbox(req *runtimeapi.ListPodSandboxRequest) (encoded, error) {
	return s.encodedPods(req.GetFilter())
}

// encodedPods returns a list of pods, oldest first.
func (s *runtimeService) encodedPods(filter *runtimeapi.PodSandboxFilter) (encoded, error) {
	return encodedItems(s.filterPods(filter), func(p *state.Pod) *state.Answer { return p.Listed }, podItem)
}

// filterPods returns the pods that match, oldest first.
func (s *runtimeService) filterPods(filter *runtimeapi.PodSandboxFilter) []*state.Pod {
	pods := s.pods.Pods()
	id, known := resolve(filter.GetId(), pods, func(p *state.Pod) string { return p.ID })
	if !known {
		return nil
	}
	return slices.DeleteFunc(pods, func(p *state.Pod) bool {
		return id != "" && p.ID != id ||
			filter.GetState() != nil && filter.GetState().GetState() != podState(p) ||
			!selected(filter.GetLabelSelector(), p.Config.GetLabels())
	})
}

func podItem(pod *state.Pod) *runtimeapi.PodSandbox {
	return &runtimeapi.PodSandbox{
		Id:             pod.ID,
		Metadata:       pod.Config.GetMetadata(),
		State:          podState(pod),
		CreatedAt:      pod.CreatedAt.UnixNano(),
		Labels:         pod.Config.GetLabels(),
		Annotations:    pod.Config.GetAnnotations(),
		RuntimeHandler: pod.Handler,
	}
}

func podStatus(pod *state.Pod) *runtimeapi.PodSandboxStatus {
	return &runtimeapi.PodSandboxStatus{
		Id:             pod.ID,
		Metadata:       pod.Config.GetMetadata(),
		State:          podState(pod),
		CreatedAt:      pod.CreatedAt.UnixNano(),
		Network:        podNetwork(pod.IPs),
		Linux:          &runtimeapi.LinuxPodSandboxStatus{Namespaces: &runtimeapi.Namespace{Options: podNamespaces(pod)}},
		Labels:         pod.Config.GetLabels(),
		Annotations:    pod.Config.GetAnnotations(),
		RuntimeHandler: pod.Handler,
	}
}

func podState(pod *state.Pod) runtimeapi.PodSandboxState {
	if pod.Ready() {
		return runtimeapi.PodSandboxState_SANDBOX_READY
	}
	return runtimeapi.PodSandboxState_SANDBOX_NOTREADY
}

// podNetwork never returns nil, because kubelet warns about a missing network. kubelet uses the
// addresses only for pods that are not on the node's network.
func podNetwork(ips []string) *runtimeapi.PodSandboxNetworkStatus {
	status := &runtimeapi.PodSandboxNetworkStatus{}
	for i, ip := range ips {
		if i == 0 {
			status.Ip = ip
		} else {
			status.AdditionalIps = append(status.AdditionalIps, &runtimeapi.PodIP{Ip: ip})
		}
	}
	return status
}

// podNamespaces returns the options of the pod's request, or the zero value if it has none.
func podNamespaces(pod *state.Pod) *runtimeapi.NamespaceOption {
	if options := pod.Config.GetLinux().GetSecurityContext().GetNamespaceOptions(); options != nil {
		return options
	}
	return &runtimeapi.NamespaceOption{}
}

// resolve expands the ID of a filter, which may be a unique prefix, to the full ID. It reports
// false if the filter matches nothing. "" stays "" and matches everything.
func resolve[T any](id string, all []T, idOf func(T) string) (full string, ok bool) {
	if id == "" {
		return "", true
	}
	for _, v := range all {
		switch candidate := idOf(v); {
		case candidate == id:
			return id, true
		case len(candidate) < len(id) || candidate[:len(id)] != id:
		case full != "":
			full, ok = candidate, false // ambiguous, unless there is an exact match
		default:
			full, ok = candidate, true
		}
	}
	return full, ok
}

// selected reports whether labels contains all pairs of the selector.
func selected(selector, labels map[string]string) bool {
	for key, want := range selector {
		if got, ok := labels[key]; !ok || got != want {
			return false
		}
	}
	return true
}

// field is a request's field and whether it is set.
type field struct {
	name string
	set  bool
}

// need returns InvalidArgument for the first field that is not set.
func need(fields ...field) error {
	for _, f := range fields {
		if !f.set {
			return errdefs.InvalidArgument("%s is required", f.name)
		}
	}
	return nil
}
