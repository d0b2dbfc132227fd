package taskapi

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"

	cgroup1 "github.com/containerd/cgroups/v3/cgroup1/stats"
	cgroup2 "github.com/containerd/cgroups/v3/cgroup2/stats"
	bootapi "github.com/containerd/containerd/api/runtime/bootstrap/v1"
	task2 "github.com/containerd/containerd/api/runtime/task/v2"
	task3 "github.com/containerd/containerd/api/runtime/task/v3"
	events "github.com/containerd/containerd/api/services/ttrpc/events/v1"
	"github.com/containerd/containerd/api/types"
	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	runtimeoptions "github.com/containerd/containerd/api/types/runtimeoptions/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/anypb"

	"berth/internal/testutil"
)

// One client serves both versions of the task service, so their messages must be the same.
func TestVersionsHaveTheSameMessages(t *testing.T) {
	old, now := task2.File_runtime_task_v2_shim_proto, task3.File_runtime_task_v3_shim_proto
	if old == nil || now == nil {
		t.Fatal("no descriptors")
	}
	methods := now.Services().Get(0).Methods()
	if methods.Len() < 17 {
		t.Fatalf("%d methods", methods.Len())
	}
	for i := range methods.Len() {
		name := methods.Get(i).Name()
		before := old.Services().Get(0).Methods().ByName(name)
		if before == nil {
			t.Errorf("version 2 has no method %s", name)
			continue
		}
		for _, pair := range [][2]protoreflect.MessageDescriptor{
			{before.Input(), methods.Get(i).Input()}, {before.Output(), methods.Get(i).Output()},
		} {
			if got, want := fieldsOf(pair[1]), fieldsOf(pair[0]); !reflect.DeepEqual(got, want) {
				t.Errorf("%s has the fields %v, in version 2 %v", pair[1].FullName(), got, want)
			}
		}
	}
}

func fieldsOf(m protoreflect.MessageDescriptor) map[string]int {
	all := map[string]int{}
	for i := range m.Fields().Len() {
		f := m.Fields().Get(i)
		all[string(f.Name())+" "+f.Kind().String()+" "+f.Cardinality().String()] = int(f.Number())
	}
	return all
}

func TestParseAnswer(t *testing.T) {
	message := func(version int32, address, protocol string) string {
		data, err := proto.Marshal(&bootapi.BootstrapResult{Version: version, Address: address, Protocol: protocol})
		testutil.Must(t, err)
		return string(data)
	}
	for _, tc := range []struct {
		answer, address string
		version         int32
		wrong           string
	}{
		{message(3, "unix:///run/s", "ttrpc"), "unix:///run/s", 3, ""},
		{message(2, "unix:///run/s", "ttrpc"), "unix:///run/s", 2, ""},
		{`{"version": 3, "address": "unix:///run/s", "protocol": "ttrpc"}`, "unix:///run/s", 3, ""},
		{"unix:///run/s\n", "unix:///run/s", 2, ""},
		{"/run/s", "/run/s", 2, ""},
		{message(3, "unix:///run/s", "grpc"), "", 0, "only ttrpc"},
		{message(4, "unix:///run/s", "ttrpc"), "", 0, "version 4"},
		{`{"version": 3}`, "", 0, "no address"},
		{"", "", 0, "no address"},
		{"unix://\x00/containerd-shim/1.sock", "", 0, "no address"},
		{"panic: x", "", 0, "no address"},
	} {
		address, version, err := parseAnswer([]byte(tc.answer))
		switch {
		case tc.wrong != "" && (err == nil || !strings.Contains(err.Error(), tc.wrong)):
			t.Errorf("parseAnswer(%q): %v, want %q", tc.answer, err, tc.wrong)
		case tc.wrong == "" && (err != nil || address != tc.address || version != tc.version):
			t.Errorf("parseAnswer(%q) = %q, %d, %v", tc.answer, address, version, err)
		}
	}
}

func FuzzParseAnswer(f *testing.F) {
	f.Add([]byte(`{"version": 3, "address": "unix:///run/s"}`))
	f.Add([]byte("unix:///run/s"))
	f.Fuzz(func(t *testing.T, answer []byte) {
		if address, version, err := parseAnswer(answer); err == nil && (!isAddress(address) || version < 2 || version > 3) {
			t.Errorf("parseAnswer(%q) = %q, %d", answer, address, version)
		}
	})
}

func TestOptions(t *testing.T) {
	for _, tc := range []struct {
		shim    string
		options []string
		want    proto.Message // nil: none
		wrong   string
	}{
		{"/bin/containerd-shim-runc-v2", []string{"BinaryName=/bin/crun", "NoPivotRoot=true"},
			&runcoptions.Options{BinaryName: "/bin/crun", NoPivotRoot: true, SystemdCgroup: true, Root: "/root/runc"}, ""},
		{"/bin/containerd-shim-runc-v2", nil, &runcoptions.Options{SystemdCgroup: true, Root: "/root/runc"}, ""},
		{"/bin/containerd-shim-kata-v2", nil, nil, ""},
		{"/bin/containerd-shim-kata-v2", []string{"ConfigPath=/etc/kata.toml"}, &runtimeoptions.Options{ConfigPath: "/etc/kata.toml"}, ""},
		{"/bin/containerd-shim-runsc-v1", []string{"TypeUrl=io.containerd.runsc.v1.options", "ConfigBody=a = 1"},
			&runtimeoptions.Options{TypeUrl: "io.containerd.runsc.v1.options", ConfigBody: []byte("a = 1")}, ""},
		{"/bin/containerd-shim-kata-v2", []string{"BinaryName=x"}, nil, "binaryName"},
		{"/bin/containerd-shim-kata-v2", []string{"ConfigPath"}, nil, "NAME=VALUE"},
		{"/bin/containerd-shim-kata-v2", []string{"=x"}, nil, "NAME=VALUE"},
	} {
		got, err := typedOptions(tc.shim, tc.options, "/root", true)
		if tc.wrong != "" {
			if err == nil || !strings.Contains(err.Error(), tc.wrong) {
				t.Errorf("%s %q: %v, want %q", tc.shim, tc.options, err, tc.wrong)
			}
			continue
		}
		testutil.Must(t, err)
		if tc.want == nil {
			if got != nil {
				t.Errorf("%s %q gets %v", tc.shim, tc.options, got)
			}
			continue
		}
		message := tc.want.ProtoReflect().New().Interface()
		testutil.Must(t, proto.Unmarshal(got.Value, message))
		if name := string(tc.want.ProtoReflect().Descriptor().FullName()); got.TypeUrl != name || !proto.Equal(message, tc.want) {
			t.Errorf("%s %q gets %s %v, want %s %v", tc.shim, tc.options, got.TypeUrl, message, name, tc.want)
		}
	}
}

// Shims measure in the form of the cgroups that they see.
func TestUsageOf(t *testing.T) {
	for _, metrics := range []proto.Message{
		&cgroup1.Metrics{CPU: &cgroup1.CPUStat{Usage: &cgroup1.CPUUsage{Total: 3000, Kernel: 1000, User: 2000}},
			Memory: &cgroup1.MemoryStat{TotalInactiveFile: 5, Usage: &cgroup1.MemoryEntry{Usage: 7, Limit: 9}},
			Pids:   &cgroup1.PidsStat{Current: 4}},
		&cgroup2.Metrics{CPU: &cgroup2.CPUStat{UsageUsec: 3, SystemUsec: 1, UserUsec: 2},
			Memory: &cgroup2.MemoryStat{InactiveFile: 5, Usage: 7, UsageLimit: 9}, Pids: &cgroup2.PidsStat{Current: 4}},
	} {
		stats, err := anypb.New(metrics)
		testutil.Must(t, err)
		u, err := usageOf(stats)
		if err != nil || u.CPU.Usage != 3000 || u.CPU.System != 1000 || u.CPU.User != 2000 ||
			u.Memory.Usage != 7 || u.Memory.Limit != 9 || u.Memory.WorkingSet() != 2 || u.Tasks != 4 {
			t.Errorf("%s: %+v, %v", stats.TypeUrl, u, err)
		}
	}
	if _, err := usageOf(&anypb.Any{TypeUrl: "example/Other"}); err == nil || !strings.Contains(err.Error(), "example/Other") {
		t.Errorf("another type: %v", err)
	}
}

// The guest of a virtual machine chooses the IDs in some events.
func TestForward(t *testing.T) {
	p := pod{dir: t.TempDir()}
	testutil.Must(t, os.Mkdir(p.taskDir("app"), 0o700))
	testutil.Must(t, os.WriteFile(filepath.Join(p.taskDir("app"), "task.json"), nil, 0o600))
	testutil.Must(t, os.Mkdir(filepath.Join(p.dir, "other"), 0o700))
	for _, tc := range []struct {
		topic, container, process string
		want                      string // the new file
	}{
		{"/tasks/start", "app", "", ""},
		{"/tasks/exit", "app", "exec-1", ""},
		{"/tasks/oom", "../app", "", ""},
		{"/tasks/oom", "other", "", ""},
		{"/tasks/oom", "app", "", "oom"},
		{"/tasks/exit", "app", "app", "exit"},
	} {
		event, err := proto.Marshal(&task3.WaitRequest{ID: tc.container, ExecID: tc.process})
		testutil.Must(t, err)
		_, err = p.Forward(t.Context(), &events.ForwardRequest{
			Envelope: &types.Envelope{Topic: tc.topic, Event: &anypb.Any{Value: event}}})
		testutil.Must(t, err)
		files, err := filepath.Glob(p.dir + "/*/[oe]*")
		testutil.Must(t, err)
		if got := strings.Join(files, " "); tc.want == "" && got != "" || tc.want != "" && !exists(filepath.Join(p.taskDir("app"), tc.want)) {
			t.Errorf("%+v: %q", tc, got)
		}
	}
}

func TestOwnMounts(t *testing.T) {
	spec := &specs.Spec{Root: &specs.Root{Path: "/state/c/1/rootfs"}, Mounts: []specs.Mount{
		{Source: "/state/c/1/volume-0/sub"}, {Source: "/state/c/1/volume-0"}, {Source: "/state/c/10/x"}, {Source: "proc"},
	}}
	own, shared := ownMounts(spec, "/state/c/1")
	if want := []string{"/state/c/1/rootfs", "/state/c/1/volume-0"}; !reflect.DeepEqual(own, want) || len(shared) != 0 {
		t.Errorf("got %q and %q, want %q", own, shared, want)
	}
	spec.Root.Path = "/state-rootfs"
	own, shared = ownMounts(spec, "/state/c/1")
	if !reflect.DeepEqual(own, []string{"/state/c/1/volume-0"}) || !reflect.DeepEqual(shared, []string{"/state-rootfs"}) {
		t.Errorf("got %q and %q", own, shared)
	}
}

func TestShimCgroup(t *testing.T) {
	for _, tc := range []struct {
		path    string
		systemd bool
		want    string
	}{{"/kubepods/pod1/abc", false, "/kubepods/pod1/shim-abc"}, {"kubepods.slice:berth:abc", true, ""}, {"", false, ""}} {
		if got := shimCgroup(tc.path, tc.systemd); got != tc.want {
			t.Errorf("shimCgroup(%q) = %q, want %q", tc.path, got, tc.want)
		}
	}
}

// A FIFO that is held passes all bytes, although its two ends are never open at the same time.
func TestStreamsAreHeld(t *testing.T) {
	s := streams{Stdout: filepath.Join(t.TempDir(), "stdout")}
	testutil.Must(t, makeFIFO(s.Stdout))
	release, err := s.hold()
	testutil.Must(t, err)
	w, err := openFIFO(s.Stdout, os.O_WRONLY)
	testutil.Must(t, err)
	_, err = fileWriter(w).Write([]byte("text"))
	testutil.Must(t, err)
	testutil.Must(t, os.NewFile(uintptr(w), "").Close())
	from, err := openFIFO(s.Stdout, os.O_RDONLY)
	testutil.Must(t, err)
	release()
	r, to, err := os.Pipe()
	testutil.Must(t, err)
	copyStream(from, int(to.Fd()), new(atomic.Int32)) // it ends, because nobody else writes
	testutil.Must(t, to.Close())
	text := make([]byte, 10)
	n, err := r.Read(text)
	if string(text[:n]) != "text" {
		t.Errorf("got %q, %v", text[:n], err)
	}
	testutil.Must(t, r.Close())
}
