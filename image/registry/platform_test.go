package registry

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/platforms"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/testutil"
)

func TestChoosePlatform(t *testing.T) {
	for _, c := range []struct {
		node, manifests, want string
	}{
		{"linux/amd64", "linux/arm64 linux/amd64 windows/amd64", "linux/amd64"},
		{"linux/amd64", "unknown/unknown linux/x86_64", "linux/x86_64"},
		{"linux/amd64", "linux/amd64/v2 linux/amd64", "linux/amd64"},
		{"linux/amd64", "linux/amd64/v1", "linux/amd64/v1"},
		{"linux/amd64", "linux/amd64/v3", ""},
		{"linux/amd64/v4", "linux/amd64/v2 linux/amd64/v3", "linux/amd64/v3"},
		{"linux/amd64/v3", "linux/amd64/v4 linux/amd64/v1 linux/386", "linux/amd64/v1"},
		{"linux/amd64/v2", "linux/amd64/v3 linux/amd64", "linux/amd64"},
		{"linux/amd64/v1", "linux/amd64/v2 linux/amd64", "linux/amd64"},
		{"linux/amd64/v4", "none linux/386", "linux/386"},
		{"linux/amd64/v3", "linux/amd64 linux/amd64/v2 linux/amd64/v4", "linux/amd64/v2"},
		{"linux/amd64", "linux/386", "linux/386"},
		{"linux/arm64", "linux/arm/v7 linux/arm64/v8", "linux/arm64/v8"},
		{"linux/aarch64", "linux/arm64", "linux/arm64"},
		{"linux/arm64/v9", "linux/arm64", "linux/arm64"},
		{"linux/arm64", "linux/arm/v6 linux/arm/v7", "linux/arm/v7"},
		{"linux/arm/v7", "linux/arm/v5 linux/arm/v6 linux/arm64", "linux/arm/v6"},
		{"linux/arm/v6", "linux/arm/v7", ""},
		{"linux/arm", "linux/armhf", "linux/armhf"},
		{"linux/arm/v7", "linux/arm", "linux/arm"},
		{"linux/riscv64", "linux/amd64 linux/riscv64", "linux/riscv64"},
		{"linux/s390x", "linux/amd64 none", "none"},
		{"linux/s390x", "none linux/s390x", "linux/s390x"},
		{"linux/amd64", "unknown/unknown", ""},
	} {
		t.Run(c.node+" of "+c.manifests, func(t *testing.T) {
			var list []ocispec.Descriptor
			for _, m := range strings.Fields(c.manifests) {
				d := ocispec.Descriptor{Annotations: map[string]string{"name": m}}
				if m != "none" {
					p := parsePlatform(m)
					d.Platform = &p
				}
				list = append(list, d)
			}
			got, ok := choosePlatform(list, parsePlatform(c.node))
			if got.Annotations["name"] != c.want || ok != (c.want != "") {
				t.Errorf("got %q, want %q", got.Annotations["name"], c.want)
			}
		})
	}
}

// The level of this CPU is that of the flags that the kernel shows.
func TestCPULevel(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		if cpuLevel() != "" {
			t.Error(cpuLevel())
		}
		return
	}
	info, err := os.ReadFile("/proc/cpuinfo")
	testutil.Must(t, err)
	_, flags, _ := strings.Cut(string(info), "\nflags")
	flags, _, _ = strings.Cut(flags, "\n")
	has := map[string]bool{}
	for _, flag := range strings.Fields(flags) {
		has[flag] = true
	}
	want := 1
	for _, names := range []string{
		"cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3", "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave", "avx512f avx512bw avx512cd avx512dq avx512vl",
	} {
		if slices.ContainsFunc(strings.Fields(names), func(flag string) bool { return !has[flag] }) {
			break
		}
		want++
	}
	if got := cpuLevel(); got != fmt.Sprint("v", want) {
		t.Errorf("%s, want v%d", got, want)
	}
	if !platforms.Only(DefaultPlatform()).Match(parsePlatform("linux/amd64")) {
		t.Error("images without a variant are not for this node")
	}
}

func TestCheckConfigPlatform(t *testing.T) {
	for name, c := range map[string]struct {
		config   string
		unstated bool
		want     codes.Code
	}{
		"same platform":                         {"linux/amd64", true, codes.OK},
		"no operating system":                   {"/amd64", true, codes.OK},
		"other operating system":                {"windows/amd64", false, codes.FailedPrecondition},
		"other architecture, direct reference":  {"linux/s390x", false, codes.OK},
		"other architecture, found by an index": {"linux/s390x", true, codes.NotFound},
		"no platform, direct reference":         {"", false, codes.OK},
		"no platform, found by an index":        {"", true, codes.NotFound},
	} {
		t.Run(name, func(t *testing.T) {
			err := checkConfigPlatform(ocispec.Image{Platform: parsePlatform(c.config)}, parsePlatform("linux/amd64"), c.unstated)
			if errdefs.Code(err) != c.want {
				t.Errorf("got %v, want %v", err, c.want)
			}
		})
	}
}
