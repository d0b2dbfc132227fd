package links

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"berth/internal/netns"
)

// Expected is the wanted state of an attachment.
type Expected struct {
	Attachment
	MAC string // of the pod's device; "": any
}

// Check compares the attachment with the node. The error names the first difference.
func (e *Expected) Check() error {
	port, err := netlink.LinkByName(PortName(e.ContainerID, e.IfName))
	if err != nil {
		return fmt.Errorf("port of container %s: %w", e.ContainerID, err)
	}
	if port.Attrs().MasterIndex != e.Bridge.Index {
		return fmt.Errorf("%s is not a port of bridge %s", port.Attrs().Name, e.Bridge.Name)
	}
	return netns.In(e.NetNS, e.checkPod)
}

func (e *Expected) checkPod() error {
	link, err := netlink.LinkByName(e.IfName)
	if err != nil {
		return fmt.Errorf("%s in the pod: %w", e.IfName, err)
	}
	if mac := link.Attrs().HardwareAddr.String(); e.MAC != "" && mac != e.MAC {
		return fmt.Errorf("%s in the pod has the hardware address %s, not %s", e.IfName, mac, e.MAC)
	}
	if link.Attrs().RawFlags&unix.IFF_UP == 0 {
		return fmt.Errorf("%s in the pod is down", e.IfName)
	}
	if err := e.checkAddresses(link); err != nil {
		return err
	}
	return e.checkRoutes(link)
}

func (e *Expected) checkAddresses(link netlink.Link) error {
	addrs, err := dump(func() ([]netlink.Addr, error) { return netlink.AddrList(link, netlink.FAMILY_ALL) })
	if err != nil {
		return fmt.Errorf("addresses of %s in the pod: %w", e.IfName, err)
	}
	for _, want := range e.IPs {
		if !slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return a.IPNet.String() == want.String() }) {
			return fmt.Errorf("%s in the pod does not have the address %s", e.IfName, want)
		}
	}
	return nil
}

func (e *Expected) checkRoutes(link netlink.Link) error {
	routes, err := dump(func() ([]netlink.Route, error) { return netlink.RouteList(link, netlink.FAMILY_ALL) })
	if err != nil {
		return fmt.Errorf("routes of the pod: %w", err)
	}
	for _, want := range e.Routes {
		if !slices.ContainsFunc(routes, func(r netlink.Route) bool {
			gateway, _ := netip.AddrFromSlice(r.Gw)
			dst := netip.PrefixFrom(unspecified(want.Dst.Addr()), 0)
			if r.Dst != nil {
				ip, _ := netip.AddrFromSlice(r.Dst.IP)
				ones, _ := r.Dst.Mask.Size()
				dst = netip.PrefixFrom(ip.Unmap(), ones)
			}
			return dst == want.Dst && gateway.Unmap() == want.Gateway
		}) {
			return fmt.Errorf("the pod has no route to %s by %s", want.Dst, want.Gateway)
		}
	}
	return nil
}

func unspecified(like netip.Addr) netip.Addr {
	if like.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}
