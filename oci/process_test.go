package oci

import (
	"reflect"
	"slices"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/testutil"
	"berth/oci/users"
)

func TestArgs(t *testing.T) {
	t.Parallel()
	type s = []string
	for _, test := range []struct {
		name                     string
		command, args, entry, im s
		want                     s
		code                     codes.Code
	}{
		{name: "image entrypoint and cmd", entry: s{"/e"}, im: s{"a"}, want: s{"/e", "a"}},
		{name: "args replace cmd", args: s{"b"}, entry: s{"/e"}, im: s{"a"}, want: s{"/e", "b"}},
		{name: "command hides entrypoint and cmd", command: s{"/c"}, entry: s{"/e"}, im: s{"a"}, want: s{"/c"}},
		{name: "command and args", command: s{"/c"}, args: s{"b"}, entry: s{"/e"}, im: s{"a"}, want: s{"/c", "b"}},
		{name: "cmd alone", im: s{"/a", "b"}, want: s{"/a", "b"}},
		{name: "args alone", args: s{"/b"}, want: s{"/b"}},
		{name: "entrypoint reset by an empty string", entry: s{""}, im: s{"/a"}, want: s{"/a"}},
		{name: "nothing", code: codes.InvalidArgument},
		{name: "empty command", command: s{""}, im: s{"/a"}, code: codes.InvalidArgument},
		{name: "NUL", command: s{"/c", "a\x00b"}, code: codes.InvalidArgument},
	} {
		t.Run(test.name, func(t *testing.T) {
			config := &runtimeapi.ContainerConfig{Command: test.command, Args: test.args}
			got, err := processArgs(config, &ocispec.ImageConfig{Entrypoint: test.entry, Cmd: test.im})
			testutil.WantError(t, err, test.code)
			if !slices.Equal(got, test.want) {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func TestEnv(t *testing.T) {
	t.Parallel()
	in := testInput()
	in.Image.Env = []string{"A=image", "PATH=/image", "B=image", "NOVALUE", "=x"}
	in.Config.Envs = []*runtimeapi.KeyValue{
		{Key: "B", Value: []byte("cri")}, {Key: "C", Value: []byte("x=y\nz")}, {Key: "A", Value: nil},
		{Key: "BIN", Value: []byte{'a', 0xff, 'b'}},
	}
	in.Config.Tty = true
	want := []string{"PATH=/image", "HOSTNAME=web-0", "TERM=xterm", "A=", "B=cri", "C=x=y\nz", "BIN=a\uFFFDb", "HOME=/root"}
	if got := mustSpec(t, in).Process.Env; !slices.Equal(got, want) {
		t.Errorf("got %q\nwant %q", got, want)
	}
}

func TestEnvDefaults(t *testing.T) {
	t.Parallel()
	in := testInput()
	in.Pod.Config.Hostname = ""
	in.User.Home = ""
	want := []string{defaultPath, "HOSTNAME=node-1", "HOME=/"}
	if got := mustSpec(t, in).Process.Env; !slices.Equal(got, want) {
		t.Errorf("got %q\nwant %q", got, want)
	}
}

func TestHomeIsAlwaysSet(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ image, passwd, want string }{
		{"", "/home/a", "HOME=/home/a"},
		{"HOME=/custom", "/home/a", "HOME=/custom"},
		{"HOME=", "/home/a", "HOME=/home/a"}, // otherwise libcontainer would set HOME itself
		{"", "relative", "HOME=/"},
		{"", "/home/a\rroot::0:0", "HOME=/"},
	} {
		t.Run(test.image+" "+test.passwd, func(t *testing.T) {
			in := testInput()
			in.Image.Env = []string{test.image}
			in.User.Home = test.passwd
			if got := mustSpec(t, in).Process.Env; !slices.Contains(got, test.want) {
				t.Errorf("image %q, passwd %q: got %q, want %q", test.image, test.passwd, got, test.want)
			}
		})
	}
}

func TestEnvRefused(t *testing.T) {
	t.Parallel()
	for _, kv := range []*runtimeapi.KeyValue{
		{Key: "", Value: []byte("x")}, {Key: "A=B", Value: []byte("x")}, {Key: "A\x00"}, {Key: "A", Value: []byte("a\x00b")},
	} {
		refused(t, func(in *ContainerInput) { in.Config.Envs = []*runtimeapi.KeyValue{kv} }, codes.InvalidArgument, "environment variable")
	}
	refused(t, func(in *ContainerInput) { in.Image.Env = []string{"A=\x00"} }, codes.InvalidArgument, `"A"`)
}

func TestCwd(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		config, image, want string
		code                codes.Code
	}{
		{want: "/"},
		{image: "/srv", want: "/srv"},
		{config: "/opt", image: "/srv", want: "/opt"},
		{config: "/a/../b/", want: "/b"},
		{config: "/../..", want: "/"},
		{config: "/proc", want: "/proc"},
		{config: "/proc/sys/net", want: "/proc/sys/net"},
		{config: "relative", code: codes.InvalidArgument},
		{image: "relative", code: codes.InvalidArgument},
		{config: "/a\x00b", code: codes.InvalidArgument},
		{config: "/proc/self/fd/7", code: codes.InvalidArgument},
		{image: "/proc/self/fd/8/../../..", want: "/proc"},
		{image: "//proc//self/fd/8", code: codes.InvalidArgument},
		{image: "/proc/thread-self/fd/8", code: codes.InvalidArgument},
		{image: "/x/../proc/1/cwd", code: codes.InvalidArgument},
	} {
		t.Run(test.config+" "+test.image, func(t *testing.T) {
			got, err := processCwd(test.config, test.image)
			testutil.WantError(t, err, test.code)
			if got != test.want {
				t.Errorf("%q, %q: got %q, want %q", test.config, test.image, got, test.want)
			}
		})
	}
}

func TestExecProcess(t *testing.T) {
	t.Parallel()
	in := testInput()
	in.sc().NoNewPrivs = true
	in.User = users.User{UID: 1000, GID: 1000, Groups: []uint32{1000, 2000}, Home: "/home/a"}
	spec := mustSpec(t, in)
	before := mustSpec(t, in)

	for _, s := range []*specs.Spec{spec, before} { // plugins may set them
		s.Process.Scheduler = &specs.Scheduler{Policy: specs.SchedBatch, Flags: []specs.LinuxSchedulerFlag{specs.SchedFlagResetOnFork}}
		s.Process.IOPriority = &specs.LinuxIOPriority{Class: specs.IOPRIO_CLASS_IDLE}
	}
	p := ExecProcess(spec, []string{"ls", "-l"}, true)
	want := *before.Process
	want.Args = []string{"ls", "-l"}
	want.Terminal = true
	want.Env = append(slices.Clone(want.Env), "TERM=xterm")
	if !reflect.DeepEqual(*p, want) {
		t.Errorf("got %+v\nwant %+v", *p, want)
	}

	p.Env[0], p.User.AdditionalGids[0], p.Capabilities.Bounding[0], *p.OOMScoreAdj = "X", 7, "CAP_X", 9
	p.Scheduler.Flags[0], p.Scheduler.Nice, p.IOPriority.Priority = "X", 5, 5
	if !reflect.DeepEqual(spec, before) {
		t.Error("a change of the exec's process changed the container's spec")
	}
	if p := ExecProcess(spec, []string{"ls"}, false); slices.Contains(p.Env, "TERM=xterm") || p.Terminal {
		t.Error("exec without terminal has one")
	}
}

func TestExecKeepsTerm(t *testing.T) {
	t.Parallel()
	in := testInput()
	in.Config.Envs = []*runtimeapi.KeyValue{{Key: "TERM", Value: []byte("vt100")}}
	p := ExecProcess(mustSpec(t, in), []string{"sh"}, true)
	if !slices.Contains(p.Env, "TERM=vt100") || slices.Contains(p.Env, "TERM=xterm") {
		t.Errorf("env %q", p.Env)
	}
}
