package server

import (
	"context"
	"encoding/json"
	"runtime"
	runtimemetrics "runtime/metrics"
	"strings"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
)

const (
	runtimeName       = "berth"
	kubeletAPIVersion = "0.1.0" // kubelet requires exactly this version
	runtimeAPIVersion = "v1"
)

// Version implements RuntimeService.
func (s *runtimeService) Version(context.Context, *runtimeapi.VersionRequest) (*runtimeapi.VersionResponse, error) {
	return &runtimeapi.VersionResponse{
		Version:           kubeletAPIVersion,
		RuntimeName:       runtimeName,
		RuntimeVersion:    s.cfg.Version,
		RuntimeApiVersion: runtimeAPIVersion,
	}, nil
}

// Status implements RuntimeService. berth serves only after it has recovered its state, so the
// runtime is ready if its directories are writable.
func (s *runtimeService) Status(ctx context.Context,
	req *runtimeapi.StatusRequest) (*runtimeapi.StatusResponse, error) {
	network := &runtimeapi.RuntimeCondition{Type: runtimeapi.NetworkReady, Status: true}
	if err := s.pods.NetworkStatus(ctx); err != nil {
		network.Status, network.Reason, network.Message = false, "NetworkPluginNotReady", err.Error()
	}
	resp := &runtimeapi.StatusResponse{
		Status: &runtimeapi.RuntimeStatus{Conditions: []*runtimeapi.RuntimeCondition{
			s.runtimeReady(), network,
		}},
		RuntimeHandlers: s.runtimeHandlers(),
		Features: &runtimeapi.RuntimeFeatures{
			SupplementalGroupsPolicy:  true,
			MountOptions:              true,
			UserNamespacesHostNetwork: s.cfg.UserNamespaces,
			SeccompProfileOci:         s.cfg.PulledSeccomp,
			CgroupMountMode:           s.cfg.CgroupMounts,
		},
	}
	if req.GetVerbose() {
		info, err := s.verboseStatus()
		if err != nil {
			return nil, err
		}
		resp.Info = info
	}
	return resp, nil
}

func (s *runtimeService) cgroupDriver() runtimeapi.CgroupDriver {
	if s.cfg.SystemdCgroup {
		return runtimeapi.CgroupDriver_SYSTEMD
	}
	return runtimeapi.CgroupDriver_CGROUPFS
}

// verboseStatus returns details for operators, each value as JSON.
func (s *runtimeService) verboseStatus() (map[string]string, error) {
	values := map[string]any{
		"config":       s.cfg.Settings(),
		"pulls":        s.images.Progress(),
		"layerDriver":  s.images.Driver(), // of new layers; "config" shows the setting
		"handlers":     s.pods.Handlers(),
		"waits":        s.waits(),
		"heap":         heap(),
		"goroutines":   runtime.NumGoroutine(), // integration tests compare it to find leaks
		"cgroupDriver": strings.ToLower(s.cgroupDriver().String()),
		"versions":     map[string]string{"berth": s.cfg.Version, "go": runtime.Version(), "cri": runtimeAPIVersion},
	}
	if s.cfg.PassedLimit != nil {
		values["waitsPastLimit"] = s.cfg.PassedLimit()
	}
	if s.cfg.Tracing != nil {
		values["tracing"] = s.cfg.Tracing.Info()
	}
	if s.cfg.Network != nil {
		values["network"] = s.cfg.Network()
	}
	return infoMap(values)
}

// heapInfo is the value "heap" of verbose Status, in bytes.
type heapInfo struct {
	InUse       uint64 `json:"inUse"` // live after the last garbage collection
	Collections uint64 `json:"collections"`
	Taken       uint64 `json:"taken"` // held by the Go runtime, including garbage and stacks
	Limit       uint64 `json:"limit"` // GOMEMLIMIT; 2^63-1: no limit
}

func heap() heapInfo {
	samples := []runtimemetrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/gc/cycles/total:gc-cycles"},
		{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}, {Name: "/gc/gomemlimit:bytes"}}
	runtimemetrics.Read(samples)
	value := func(i int) uint64 { return samples[i].Value.Uint64() }
	return heapInfo{InUse: value(0), Collections: value(1), Taken: value(2) - value(3), Limit: value(4)}
}

// waitInfo is an item of "waits" in verbose Status.
type waitInfo struct {
	What    string    `json:"what"`
	Object  string    `json:"object"`
	Since   time.Time `json:"since"`
	Seconds float64   `json:"seconds"`

	LimitSeconds float64 `json:"limitSeconds,omitempty"` // 0: only the client limits the wait
	Overdue      bool    `json:"overdue,omitempty"`
}

func (s *runtimeService) waits() []waitInfo {
	now := time.Now()
	all := []waitInfo{}
	for _, w := range s.pods.Waits() {
		all = append(all, waitInfo{What: w.What, Object: w.Object, Since: w.Since, Seconds: now.Sub(w.Since).Seconds(),
			LimitSeconds: w.Limit.Seconds(), Overdue: w.Overdue(now)})
	}
	return all
}

// RuntimeConfig implements RuntimeService. It always names the driver, because kubelet takes a
// missing driver for systemd.
func (s *runtimeService) RuntimeConfig(context.Context,
	*runtimeapi.RuntimeConfigRequest) (*runtimeapi.RuntimeConfigResponse, error) {
	return &runtimeapi.RuntimeConfigResponse{
		Linux: &runtimeapi.LinuxRuntimeConfiguration{CgroupDriver: s.cgroupDriver()},
	}, nil
}

// UpdateRuntimeConfig implements RuntimeService. It sets the pod CIDRs of the node. Networks with
// the capability ipRanges get them. An empty CIDR means that kubelet has no CIDR.
func (s *runtimeService) UpdateRuntimeConfig(ctx context.Context,
	req *runtimeapi.UpdateRuntimeConfigRequest) (*runtimeapi.UpdateRuntimeConfigResponse, error) {
	if cidrs := req.GetRuntimeConfig().GetNetworkConfig().GetPodCidr(); cidrs != "" {
		if err := s.pods.UpdatePodCIDR(ctx, cidrs); err != nil {
			return nil, err
		}
	}
	return &runtimeapi.UpdateRuntimeConfigResponse{}, nil
}

// infoMap encodes the values of a verbose answer.
func infoMap(values map[string]any) (map[string]string, error) {
	info := make(map[string]string, len(values))
	for key, value := range values {
		text, err := json.Marshal(value)
		if err != nil {
			return nil, errdefs.Internal("encode %s of verbose answer: %w", key, err)
		}
		info[key] = string(text)
	}
	return info, nil
}
