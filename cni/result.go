package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"berth/internal/errdefs"
)

// Result is the result of a pod's ADD.
type Result struct {
	IPs []netip.Addr // primary first; empty for a network without addresses
}

// checkResult refuses output that makes libcni panic. libcni expects an object. When it converts
// versions, it dereferences every element of these lists.
func checkResult(stdout []byte) error {
	var top map[string]any
	if err := json.Unmarshal(stdout, &top); err != nil {
		return fmt.Errorf("not a JSON object: %w", err)
	}
	if top == nil {
		return errors.New("null")
	}
	for key, value := range top {
		list, isList := value.([]any)
		if !isList || !slices.ContainsFunc([]string{"ips", "interfaces", "routes"},
			func(k string) bool { return strings.EqualFold(k, key) }) {
			continue
		}
		if slices.Contains(list, nil) {
			return fmt.Errorf("null in %q", key)
		}
	}
	return nil
}

func newResult(r types.Result, ifName string) (Result, error) {
	current, err := types100.NewResultFromResult(r)
	if err != nil {
		return Result{}, errdefs.Internal("CNI result: %w", err)
	}
	ips, err := podIPs(current, ifName)
	if err != nil {
		return Result{}, errdefs.Internal("CNI result: %w", err)
	}
	return Result{IPs: ips}, nil
}

// podIPs returns the addresses of the pod's interface in the order of the result, primary first.
// Addresses without an interface count as the pod's. If the interface has no address, because the
// plugin uses another name, all other addresses count. Loopback addresses never count.
func podIPs(r *types100.Result, ifName string) ([]netip.Addr, error) {
	var own, others []netip.Addr
	for _, c := range r.IPs {
		addr, ok := netip.AddrFromSlice(c.Address.IP)
		if !ok {
			return nil, fmt.Errorf("invalid address %q", c.Address.String())
		}
		addr = addr.Unmap()
		name := ifName
		if c.Interface != nil {
			if *c.Interface < 0 || *c.Interface >= len(r.Interfaces) {
				return nil, fmt.Errorf("address %s refers to interface %d of %d", addr, *c.Interface, len(r.Interfaces))
			}
			name = r.Interfaces[*c.Interface].Name
		}
		switch {
		case addr.IsLoopback() || name == "lo" || slices.Contains(own, addr) || slices.Contains(others, addr):
		case name == ifName:
			own = append(own, addr)
		default:
			others = append(others, addr)
		}
	}
	if len(own) > 0 {
		return own, nil
	}
	return others, nil
}
