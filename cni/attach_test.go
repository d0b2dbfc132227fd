package cni

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/testutil"
)

func TestDelUsesConfigOfAdd(t *testing.T) {
	for _, change := range []string{"changed", "deleted"} {
		t.Run(change, func(t *testing.T) {
			b := newBed(t)
			b.plugin("a", okResult)
			b.plugin("b", okResult)
			b.writeConf("1.conflist", `{"cniVersion":"1.0.0","name":"old","plugins":[{"type":"a","subnet":"192.0.2.0/24"}]}`)
			n := b.start()
			att := b.add(testPod("p1"))
			if change == "changed" {
				b.writeConf("1.conflist", conflist("1.0.0", "new", "b"))
				b.network("new")
			} else {
				testutil.Must(t, os.Remove(b.conf+"/1.conflist"))
				b.network("")
			}
			record, err := json.Marshal(att)
			testutil.Must(t, err)
			var stored Attachment
			testutil.Must(t, json.Unmarshal(record, &stored))
			b.forget()
			testutil.Must(t, n.Del(context.Background(), stored, testPod("p1")))
			if want := []string{"a DEL p1"}; !slices.Equal(b.calls(), want) {
				t.Errorf("calls %q, want %q", b.calls(), want)
			}
			var seen struct {
				Name, Subnet string
				PrevResult   *struct{ IPs []struct{ Address string } }
			}
			testutil.Must(t, json.Unmarshal([]byte(b.saw("a.DEL.stdin")), &seen))
			if seen.Name != "old" || seen.Subnet != "192.0.2.0/24" || seen.PrevResult == nil || seen.PrevResult.IPs[0].Address != "192.0.2.5/24" {
				t.Errorf("DEL saw %s", b.saw("a.DEL.stdin"))
			}
		})
	}
}

func TestDelIsRepeatable(t *testing.T) {
	b := newBed(t)
	b.plugin("a", okResult)
	b.plugin("b", okResult)
	b.writeConf("1.conflist", conflist("1.0.0", "n", "a", "b"))
	n := b.start()
	ctx := context.Background()

	t.Run("twice, and without namespace", func(t *testing.T) {
		pod := testPod("p1")
		att := b.add(pod)
		testutil.Must(t, n.Del(ctx, att, pod))
		for _, gone := range []string{"/nonexistent/netns", b.conf + "/1.conflist", ""} { // missing, not a namespace, empty
			pod.NetNS = gone
			testutil.Must(t, n.Del(ctx, att, pod))
			if got := getenv(strings.Split(b.saw("a.DEL.env"), "\n"), "CNI_NETNS"); got != "" {
				t.Errorf("CNI_NETNS=%q, want none", got)
			}
		}
	})
	t.Run("reverse order, after a failed ADD too", func(t *testing.T) {
		b.plugin("b", `[ "$CNI_COMMAND" = DEL ] || exit 1`)
		b.forget()
		pod, att := testPod("p2"), b.plan()
		if _, err := n.Add(ctx, att, pod); err == nil {
			t.Fatal("ADD of a failing chain succeeded")
		}
		testutil.Must(t, n.Del(ctx, att, pod))
		if want := []string{"a ADD p2", "b ADD p2", "b DEL p2", "a DEL p2"}; !slices.Equal(b.calls(), want) {
			t.Errorf("calls %q, want %q", b.calls(), want)
		}
	})
	t.Run("a plugin that does not know the pod does not stop the chain", func(t *testing.T) {
		b.plugin("b", `echo '{"code":3,"msg":"unknown container"}'; exit 1`)
		b.forget()
		testutil.Must(t, n.Del(ctx, b.plan(), testPod("p3")))
		if want := []string{"b DEL p3", "a DEL p3"}; !slices.Equal(b.calls(), want) {
			t.Errorf("calls %q, want %q", b.calls(), want)
		}
	})
	t.Run("failure, then again", func(t *testing.T) {
		b.plugin("b", `echo '{"code":11,"msg":"not now"}'; exit 1`)
		if err := n.Del(ctx, b.plan(), testPod("p4")); errdefs.Code(err) != codes.Unavailable {
			t.Errorf("error %v (%v)", err, errdefs.Code(err))
		}
		b.plugin("b", okResult)
		testutil.Must(t, n.Del(ctx, b.plan(), testPod("p4")))
	})
	t.Run("plugin not installed", func(t *testing.T) {
		att := b.plan()
		testutil.Must(t, os.Remove(b.bin+"/b"))
		err := n.Del(ctx, att, testPod("p5"))
		if errdefs.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), `CNI plugin "b" is not installed in `+b.bin) {
			t.Errorf("error %v (%v)", err, errdefs.Code(err))
		}
	})
	t.Run("nothing was attached", func(t *testing.T) {
		b.forget()
		testutil.Must(t, n.Del(ctx, Attachment{}, testPod("p6")))
		if b.calls() != nil {
			t.Errorf("calls %q", b.calls())
		}
	})
	t.Run("damaged record", func(t *testing.T) {
		err := n.Del(ctx, Attachment{Network: "n", IfName: IfName, ConfList: []byte("{")}, testPod("p7"))
		if errdefs.Code(err) != codes.FailedPrecondition {
			t.Errorf("error %v (%v)", err, errdefs.Code(err))
		}
	})
}

// A crash during a write damages the cache.
func TestDelWithDamagedCache(t *testing.T) {
	b := newBed(t)
	b.plugin("a", okResult)
	b.writeConf("1.conflist", conflist("1.0.0", "n", "a"))
	n := b.start()
	att := b.add(testPod("p1"))
	testutil.Must(t, os.WriteFile(b.cache+"/results/n-p1-eth0", []byte(`{"kind":"cni`), 0o600))
	testutil.Must(t, n.Del(context.Background(), att, testPod("p1")))
	left, err := os.ReadDir(b.cache + "/results")
	testutil.Must(t, err)
	if len(left) != 0 {
		t.Errorf("left in the cache: %v", left)
	}
	if _, err := os.Stat(libcni.CacheDir + "/results/n-p1-eth0"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("libcni's default cache was used: %v", err)
	}
}

func TestCapabilityArgs(t *testing.T) {
	b := newBed(t)
	b.plugin("all", okResult)
	b.plugin("some", okResult)
	b.plugin("none", okResult)
	b.writeConf("1.conflist", `{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"none"},
		{"type":"all","capabilities":{"portMappings":true,"bandwidth":true,"dns":true,"ipRanges":true,"cgroupPath":true,"mac":true}},
		{"type":"some","capabilities":{"portMappings":true,"dns":false}}]}`)
	n := b.start()
	pod := testPod("p1")
	pod.PortMappings = []PortMapping{{HostPort: 8080, ContainerPort: 80, Protocol: "tcp", HostIP: "127.0.0.1"}, {HostPort: 53, ContainerPort: 53, Protocol: "udp"}}
	pod.Bandwidth = &Bandwidth{IngressRate: 1000, IngressBurst: 2000}
	pod.DNS = &DNS{Servers: []string{"192.0.2.1"}, Searches: []string{"shop.svc"}, Options: []string{"ndots:5"}}
	pod.IPRanges = [][]IPRange{{{Subnet: "192.0.2.0/24"}}}
	pod.CgroupPath = "/kubepods/p1"
	att := b.add(pod)
	testutil.Must(t, n.Del(context.Background(), att, pod))

	const ports = `"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp","hostIP":"127.0.0.1"},{"hostPort":53,"containerPort":53,"protocol":"udp"}]`
	for record, want := range map[string]string{
		"none.ADD.stdin": `null`,
		"some.ADD.stdin": `{` + ports + `}`,
		"all.ADD.stdin": `{` + ports + `,"bandwidth":{"ingressRate":1000,"ingressBurst":2000},
			"dns":{"servers":["192.0.2.1"],"searches":["shop.svc"],"options":["ndots:5"]},
			"ipRanges":[[{"subnet":"192.0.2.0/24"}]],"cgroupPath":"/kubepods/p1"}`,
		"some.DEL.stdin": `{` + ports + `}`,
	} {
		var seen struct{ RuntimeConfig any }
		var wanted any
		testutil.Must(t, json.Unmarshal([]byte(b.saw(record)), &seen))
		testutil.Must(t, json.Unmarshal([]byte(want), &wanted))
		if !reflect.DeepEqual(seen.RuntimeConfig, wanted) {
			t.Errorf("%s: runtimeConfig %v, want %v", record, seen.RuntimeConfig, wanted)
		}
	}
}

func TestAddRefusesArgsInjection(t *testing.T) {
	b := newBed(t)
	b.plugin("a", okResult)
	b.writeConf("1.conflist", conflist("1.0.0", "n", "a"))
	n := b.start()
	for name, spoil := range map[string]func(*Pod){
		"name":      func(p *Pod) { p.Name = "web;IP=192.0.2.9" },
		"namespace": func(p *Pod) { p.Namespace = "a=b" },
		"uid":       func(p *Pod) { p.UID = "x\ny" },
		"id":        func(p *Pod) { p.ID = "../p1" },
		"empty id":  func(p *Pod) { p.ID = "" },
		"NUL":       func(p *Pod) { p.Name = "a\x00b" },
	} {
		t.Run(name, func(t *testing.T) {
			pod := testPod("p1")
			spoil(&pod)
			if _, err := n.Add(context.Background(), b.plan(), pod); errdefs.Code(err) != codes.InvalidArgument {
				t.Errorf("add: %v (%v)", err, errdefs.Code(err))
			}
			testutil.Must(t, n.Del(context.Background(), b.plan(), pod))
			if b.calls() != nil {
				t.Errorf("calls %q", b.calls())
			}
		})
	}
	pod := testPod("p1")
	pod.NetNS = ""
	if _, err := n.Add(context.Background(), b.plan(), pod); errdefs.Code(err) != codes.InvalidArgument {
		t.Errorf("add without namespace: %v", err)
	}
}

func TestGC(t *testing.T) {
	b := newBed(t)
	b.plugin("a", okResult)
	b.plugin("old", `[ $CNI_COMMAND = GC ] && { echo '{"code":4,"msg":"unknown CNI_COMMAND: GC"}'; exit 1; }; `+okResult)
	b.plugin("other", okResult)
	b.writeConf("1.conflist", `{"cniVersion":"1.1.0","name":"first","plugins":[{"type":"a","x":"y"},{"type":"old"}]}`)
	n := b.start()
	kept, stale := testPod("kept"), testPod("stale")
	b.add(kept)
	b.add(stale)
	b.writeConf("1.conflist", conflist("1.1.0", "second", "other"))
	b.network("second")
	b.forget()
	testutil.Must(t, n.GC(context.Background(), []Pod{kept}))
	calls := slices.DeleteFunc(b.calls(), func(c string) bool { return strings.Contains(c, "STATUS") })
	if want := []string{"old DEL stale", "a DEL stale", "other GC ", "a GC ", "old GC "}; !slices.Equal(calls, want) {
		t.Errorf("calls %q, want %q", calls, want)
	}
	var seen struct {
		Name, X string
		Valid   []types.GCAttachment `json:"cni.dev/valid-attachments"`
	}
	testutil.Must(t, json.Unmarshal([]byte(b.saw("a.GC.stdin")), &seen))
	if seen.Name != "first" || seen.X != "y" || !slices.Equal(seen.Valid, []types.GCAttachment{{ContainerID: "kept", IfName: IfName}}) {
		t.Errorf("GC saw %s", b.saw("a.GC.stdin"))
	}

	b.forget()
	testutil.Must(t, n.GC(context.Background(), []Pod{kept})) // the stale pod's record was removed
	if slices.Contains(b.calls(), "a DEL stale") {
		t.Errorf("calls %q", b.calls())
	}
}

func TestGCDisabledOrOld(t *testing.T) {
	for _, conf := range []string{
		`{"cniVersion":"1.1.0","name":"n","disableGC":true,"plugins":[{"type":"a"}]}`,
		conflist("1.0.0", "n", "a"),
	} {
		b := newBed(t)
		b.plugin("a", okResult)
		b.writeConf("1.conflist", conf)
		n := b.start()
		testutil.Must(t, n.GC(context.Background(), nil))
		if slices.Contains(b.calls(), "a GC ") {
			t.Errorf("GC was called for %s", conf)
		}
	}
}

func TestGCContinuesAfterError(t *testing.T) {
	b := newBed(t)
	b.plugin("a", `[ $CNI_COMMAND != GC ] || exit 1; `+okResult)
	b.plugin("b", okResult)
	b.writeConf("1.conflist", conflist("1.1.0", "n", "a", "b"))
	n := b.start()
	err := n.GC(context.Background(), nil)
	if err == nil || !strings.Contains(err.Error(), `network "n"`) || !slices.Contains(b.calls(), "b GC ") {
		t.Errorf("error %v, calls %q", err, b.calls())
	}
}

// The specification forbids GC during ADD and DEL.
func TestGCWaitsForAdd(t *testing.T) {
	b := newBed(t)
	b.plugin("a", `[ $CNI_COMMAND != ADD ] || { echo $$ >$record/adding; while [ ! -e $record/go ]; do sleep 0.01; done; }; `+okResult)
	b.writeConf("1.conflist", conflist("1.1.0", "n", "a"))
	n := b.start()
	added := make(chan error, 1)
	go func() {
		_, err := n.Add(context.Background(), b.plan(), testPod("p1"))
		added <- err
	}()
	b.readPID("adding")
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := n.GC(ctx, nil); errdefs.Code(err) != codes.Canceled || slices.Contains(b.calls(), "a GC ") {
		t.Errorf("GC beside ADD: %v (%v), calls %q", err, errdefs.Code(err), b.calls())
	}
	testutil.Must(t, os.WriteFile(b.record+"/go", nil, 0o644))
	testutil.Must(t, <-added)
	testutil.Must(t, n.GC(context.Background(), []Pod{testPod("p1")}))
}
