package nodecheck

import (
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

func TestTrialsNameTheFix(t *testing.T) {
	for _, tc := range []struct {
		name, subject string
		err           error
		level         Level
		fix           []string
	}{
		{"works", "veth", nil, OK, nil},
		{"no veth", "veth", unix.EOPNOTSUPP, Warning, []string{"modprobe -a veth,", "/etc/modules-load.d", "CONFIG_VETH", "interfaces"}},
		{"no bridge", "bridge", unix.EOPNOTSUPP, Warning, []string{"modprobe -a bridge,", "CONFIG_BRIDGE"}},
		{"no nftables", "nftables", unix.EPROTONOSUPPORT, Warning, []string{"modprobe -a nf_tables ", "CONFIG_NF_TABLES"}},
		{"no masquerading", "iptables", fmt.Errorf("exit status 3: no chain/target/match by that name"), Warning, []string{"xt_MASQUERADE", "portmap"}},
		{"no iptables", "iptables", &exec.Error{Name: "iptables", Err: exec.ErrNotFound}, Warning, []string{"install iptables"}},
		{"not allowed", "veth", fmt.Errorf("unshare: %w", unix.EPERM), Warning, []string{"CAP_NET_ADMIN"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			i := slices.IndexFunc(trials, func(tr trial) bool { return tr.subject == tc.subject })
			f := trials[i].finding(tc.err)
			if f.Level != tc.level || tc.err != nil && !strings.Contains(f.Found, tc.err.Error()) {
				t.Errorf("%s: %s", f.Level, f.Found)
			}
			for _, part := range tc.fix {
				if !strings.Contains(f.Fix, part) {
					t.Errorf("the fix %q does not contain %q", f.Fix, part)
				}
			}
		})
	}
}

// The test's own namespace must have the same links before and after.
func TestTrialsAreMadeElsewhere(t *testing.T) {
	testutil.NeedRoot(t)
	links := func() (names []string) {
		all, err := netlink.LinkList()
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range all {
			names = append(names, l.Attrs().Name)
		}
		return names
	}
	before := links()
	findings := checkNetworkParts(t.Context(), machine(t, kernel(6, 12), nil))
	if f := find(t, findings, "veth", "works"); f.Level != OK {
		t.Errorf("veth: %s", f.Found)
	}
	if len(findings) != len(trials) {
		t.Errorf("the findings are %v", findings)
	}
	if after := links(); !slices.Equal(before, after) {
		t.Errorf("the links were %v, they are %v", before, after)
	}
}
