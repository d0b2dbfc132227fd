package registry

import (
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
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

// The level of this CPU is the highest whose libraries glibc's loader uses. Flags in /proc/cpuinfo
// do not tell: a kernel can hide features that programs still have.
func TestCPULevel(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		if cpuLevel() != "" {
			t.Error(cpuLevel())
		}
		return
	}
	help, err := exec.Command("/lib64/ld-linux-x86-64.so.2", "--help").Output()
	testutil.Must(t, err)
	want := "v1"
	for _, level := range []string{"v2", "v3", "v4"} {
		if strings.Contains(string(help), "x86-64-"+level+" (supported") {
			want = level
		}
	}
	if got := cpuLevel(); got != want {
		t.Errorf("%s, want %s", got, want)
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

// An index on this machine is searched in the same way. Manifests may be missing.
func TestResolveLocalWithoutPlatforms(t *testing.T) {
	blobs, v2 := map[digest.Digest][]byte{}, specs.Versioned{SchemaVersion: 2}
	put := func(v any) ocispec.Descriptor {
		data := mustJSON(t, v)
		d := digest.FromBytes(data)
		blobs[d] = data
		return ocispec.Descriptor{Digest: d, Size: int64(len(data))}
	}
	image := func(platform string) ocispec.Descriptor {
		config := put(ocispec.Image{Platform: parsePlatform(platform), RootFS: ocispec.RootFS{Type: "layers"}})
		config.MediaType = ociConfig
		return put(ocispec.Manifest{Versioned: v2, Config: config, Layers: []ocispec.Descriptor{}})
	}
	read := func(d ocispec.Descriptor) ([]byte, error) {
		if data, ok := blobs[d.Digest]; ok {
			return data, nil
		}
		return nil, errdefs.NotFound("no blob %s", d.Digest)
	}
	missing, windows, node := image("linux/s390x"), image("windows/amd64"), image("linux/amd64")
	delete(blobs, missing.Digest)
	top := put(ocispec.Index{Versioned: v2, Manifests: []ocispec.Descriptor{missing, windows, node}})
	img, err := ResolveLocal(read, top, parsePlatform("linux/amd64"))
	if err != nil || img.Digest != top.Digest || img.Config.OS != "linux" || img.Documents[1].Digest != node.Digest {
		t.Errorf("%+v, %v", img, err)
	}
	_, err = ResolveLocal(read, top, parsePlatform("linux/arm64"))
	wantCode(t, err, codes.NotFound, missing.Digest.String())
}
