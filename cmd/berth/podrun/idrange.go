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

// The IDs of the host that pods with a user namespace get from here: those that systemd's
// list of ranges calls unused (uapi-group.org, "Users, Groups, UIDs and GIDs on systemd Systems").
// kubelet counts up from 65536 and stays far below with any number of pods.
const (
	firstHostID = 0x7000_0000
	hostRanges  = (0x7ffe_0000 - firstHostID) / podyaml.UserNamespaceIDs
)

// chooseHostIDs returns the first of 65536 IDs that no pod of the runtime has. Where the search
// begins is random, so that two runs at the same moment do not choose the same.
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
	return 0, fmt.Errorf("choose IDs for a user namespace: pods have all from %d on", firstHostID)
}

// takenHostIDs are the mappings of all pods, users' and groups'.
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
