package podrun

import (
	"context"
	"fmt"
	"math/rand/v2"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/podyaml"
)

// The host IDs for pods with a user namespace. systemd's list of ranges calls them unused
// (uapi-group.org, "Users, Groups, UIDs and GIDs on systemd Systems"). kubelet counts up from 65536
// and stays far below.
const (
	firstHostID = 0x7000_0000
	hostRanges  = (0x7ffe_0000 - firstHostID) / podyaml.UserNamespaceIDs
)

// chooseHostIDs returns the first of 65536 IDs that no pod of the runtime uses. The search starts
// at a random place, so that two simultaneous runs choose different IDs.
func (r *podRun) chooseHostIDs(ctx context.Context) (uint32, error) {
	taken, err := r.takenHostIDs(ctx)
	if err != nil {
		return 0, fmt.Errorf("choose IDs for a user namespace: %w", err)
	}
	begin := rand.Uint32N(hostRanges)
	for i := range uint32(hostRanges) {
		first := firstHostID + (begin+i)%hostRanges*podyaml.UserNamespaceIDs
		if !overlaps(taken, first) {
			return first, nil
		}
	}
	return 0, fmt.Errorf("choose IDs for a user namespace: pods use all IDs from %d on", firstHostID)
}

// takenHostIDs returns the user and group mappings of all pods.
func (r *podRun) takenHostIDs(ctx context.Context) ([]*runtimeapi.IDMapping, error) {
	pods, err := r.client.Pods(ctx)
	if err != nil {
		return nil, err
	}
	var taken []*runtimeapi.IDMapping
	for _, pod := range pods {
		state, err := r.client.PodState(ctx, pod.GetId())
		if status.Code(err) == codes.NotFound {
			continue // removed meanwhile
		}
		if err != nil {
			return nil, err
		}
		options := state.GetLinux().GetNamespaces().GetOptions().GetUsernsOptions()
		taken = append(append(taken, options.GetUids()...), options.GetGids()...)
	}
	return taken, nil
}

func overlaps(taken []*runtimeapi.IDMapping, first uint32) bool {
	for _, m := range taken {
		begin, end := uint64(m.GetHostId()), uint64(m.GetHostId())+uint64(m.GetLength())
		if uint64(first) < end && begin < uint64(first)+podyaml.UserNamespaceIDs {
			return true
		}
	}
	return false
}
