package cni

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"berth/internal/testutil"
)

func TestCachedResults(t *testing.T) {
	for version, result := range map[string]string{
		"0.2.0": `{"cniVersion":"0.2.0","ip4":{"ip":"192.0.2.5/24"},"ip6":{"ip":"fd00::5/64"}}`,
		"1.0.0": `{"cniVersion":"1.0.0","ips":[{"address":"192.0.2.5/24"},{"address":"fd00::5/64"}]}`,
	} {
		t.Run(version, func(t *testing.T) {
			cache := t.TempDir()
			if _, err := addPrinted(t, cache, version, []byte(result)); err != nil {
				t.Fatal(err)
			}
			cached, err := CachedResults(cache)
			testutil.Must(t, err)
			if len(cached) != 1 || cached[0].PodID != "p1" || cached[0].Network != "n" || !slices.Equal(cached[0].IPs, []string{"192.0.2.5", "fd00::5"}) {
				t.Errorf("results are %+v", cached)
			}
			testutil.Must(t, os.WriteFile(cached[0].File, []byte("{"), 0o600))
			cached, err = CachedResults(cache)
			testutil.Must(t, err)
			if len(cached) != 1 || cached[0].PodID != "" {
				t.Errorf("results of an invalid file are %+v", cached)
			}
		})
	}
	t.Run("no cache", func(t *testing.T) {
		if cached, err := CachedResults(t.TempDir()); err != nil || cached != nil {
			t.Errorf("results are %v, %v", cached, err)
		}
	})
}

func TestMayHold(t *testing.T) {
	t.Parallel()
	cache := t.TempDir()
	testutil.Must(t, os.MkdirAll(filepath.Join(cache, "results"), 0o700))
	testutil.Must(t, os.WriteFile(filepath.Join(cache, "results", "net-cached-eth0"), []byte(`{"containerId": "cached", "networkName": "net"}`), 0o600))
	ipam := &fakeIPAM{held: "reserved"}
	for _, tt := range []struct {
		name, cache, pod, netns string
		want                    bool
	}{
		{"cached result", cache, "cached", "", true},
		{"reserved address", cache, "reserved", "", true},
		{"nothing", cache, "other", "", false},
		{"no such namespace", cache, "other", "/nonexistent", false},
		{"not a namespace", cache, "other", cache, false},
		{"network namespace", cache, "other", "/proc/self/ns/net", true},
		{"no cache", t.TempDir(), "cached", "", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := &Network{cfg: Config{CacheDir: tt.cache, Readers: Readers{IPAMs: []IPAMReader{ipam}}}}
			if got, err := n.MayHold(tt.pod, tt.netns); got != tt.want || err != nil {
				t.Errorf("MayHold is %t, %v", got, err)
			}
		})
	}
}

// fakeIPAM is an IPAM plugin of networks with the plugin type "with-ipam".
type fakeIPAM struct {
	IPAMReader
	held string // pod ID
}

func (f *fakeIPAM) Holds(podID string) (bool, error) { return podID == f.held, nil }

func (f *fakeIPAM) Uses(list *libcni.NetworkConfigList) bool {
	return slices.ContainsFunc(list.Plugins, func(p *libcni.PluginConfig) bool { return p.Network.Type == "with-ipam" })
}

func (f *fakeIPAM) Reservations(*libcni.NetworkConfigList) ([]Reservation, error) {
	return []Reservation{{File: "/net/192.0.2.5", IP: "192.0.2.5", PodID: f.held}}, nil
}
