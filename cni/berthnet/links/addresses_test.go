package links

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"berth/internal/netns"
	"berth/internal/testutil"
)

// A node may have so many addresses that the kernel returns them in several pieces.
func TestAddressesOfOneInterface(t *testing.T) {
	testutil.NeedRoot(t)
	err := netns.InNew(func() error {
		bridge, err := addressed(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "bn0"}},
			"10.99.0.1/24", "10.98.0.1/16", "169.254.7.1/16", "fd99::1/64", "fe80::7/64")
		if err != nil {
			return err
		}
		peer := &netlink.Addr{IPNet: ipNet("192.0.2.1/32"), Peer: ipNet("192.0.2.2/32")}
		if err := netlink.AddrAdd(bridge, peer); err != nil {
			return err
		}
		var services []string
		for i := range 200 {
			services = append(services, fmt.Sprintf("10.96.%d.1/32", i), fmt.Sprintf("fd96::%x:1/128", i+1))
		}
		if _, err := addressed(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "services"}}, services...); err != nil {
			return err
		}

		index := bridge.Attrs().Index
		all, err := addressesOf(index)
		if err != nil {
			return err
		}
		slices.SortFunc(all, netip.Prefix.Compare)
		want := prefixes("10.98.0.1/16", "10.99.0.1/24", "169.254.7.1/16", "192.0.2.1/32", "fd99::1/64", "fe80::7/64")
		if !slices.Equal(all, want) {
			t.Errorf("the bridge has %v, want %v", all, want)
		}
		b, err := FindBridge("bn0")
		if err != nil {
			return err
		}
		if want := prefixes("10.98.0.1/16", "10.99.0.1/24", "192.0.2.1/32", "fd99::1/64"); !slices.Equal(b.Prefixes, want) {
			t.Errorf("the bridge is found with %v, want %v", b.Prefixes, want)
		}
		messages, err := askAddresses(index)
		if err != nil {
			return err
		}
		if len(messages) != len(all) {
			t.Errorf("the kernel returns %d addresses of %d", len(messages), len(all))
		}
		if _, err := addressesOf(index + 1000); !errors.Is(err, unix.ENODEV) {
			t.Errorf("of a missing interface: %v", err)
		}
		return nil
	})
	testutil.Must(t, err)
}

// addressed adds an interface with addresses.
func addressed(link netlink.Link, cidrs ...string) (netlink.Link, error) {
	if err := netlink.LinkAdd(link); err != nil {
		return nil, err
	}
	for _, cidr := range cidrs {
		if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: ipNet(cidr), Flags: unix.IFA_F_NODAD}); err != nil {
			return nil, fmt.Errorf("add %s: %w", cidr, err)
		}
	}
	return link, nil
}

func ipNet(cidr string) *net.IPNet {
	ip, n, err := net.ParseCIDR(cidr)
	if err != nil {
		panic(err)
	}
	return &net.IPNet{IP: ip, Mask: n.Mask}
}

func prefixes(cidrs ...string) (all []netip.Prefix) {
	for _, cidr := range cidrs {
		all = append(all, netip.MustParsePrefix(cidr))
	}
	return all
}
