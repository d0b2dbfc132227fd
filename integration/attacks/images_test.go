package attacks

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
)

// hostileImages numbers the images, for their names.
var hostileImages atomic.Int32

// hostileImage pushes an image to the shared registry: busybox with these layers on top.
func hostileImage(t *testing.T, config v1.Config, trees ...fixture.Tree) string {
	t.Helper()
	n := hostileImages.Add(1)
	name, _ := harness.Push(t, harness.Registry, fmt.Sprintf("hostile/%d:latest", n), harness.BuildImage(t, config, trees...))
	return name
}

// canary is a file of the host that no image may read or change.
func canary(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "canary")
	harness.Must(t, os.WriteFile(path, []byte("the host's own"), 0o600))
	t.Cleanup(func() {
		content := harness.Get(os.ReadFile(path))(t)
		harness.Equal(t, "a file of the host", string(content), "the host's own")
	})
	return path
}

// One layer has a symbolic link to the host, the next a file below that link. An unpacker that
// follows paths writes that file to the host. Here the link resolves inside the container's root.
func TestCVE_2025_47290_SymlinkDuringUnpack(t *testing.T) {
	d := harness.StartDaemon(t)
	host := canary(t)
	dir := filepath.Dir(host)
	name := hostileImage(t, v1.Config{},
		fixture.Tree{fixture.Symlink("escape", dir), fixture.Symlink("up", "../../../../.."+dir)},
		fixture.Tree{fixture.File("escape/canary", 0o644, "overwritten"), fixture.File("up/canary", 0o644, "overwritten")},
		fixture.Tree{fixture.Dir("swap", 0o755), fixture.File("swap/a", 0o644, "x"), fixture.Symlink("swap", dir), fixture.File("swap/canary", 0o644, "overwritten")})
	if _, err := d.TryPull(t, name, nil); err != nil {
		harness.WantCode(t, err, codes.DataLoss) // a refusal of the whole image is correct, too
		return
	}
	d.RunPod(t, harness.HostNetwork).Sh(t, "ls -ld /escape /up /swap", harness.Image(name))
}

// A layer has a hard link to a file outside the layer.
func TestHardLinkToFileOutsideLayer(t *testing.T) {
	d := harness.StartDaemon(t)
	for _, target := range []string{canary(t), "../../../../../../../../etc/passwd", "/proc/self/environ"} {
		img := harness.BuildImage(t, v1.Config{}, fixture.Tree{fixture.Hardlink("stolen", target)})
		name, _ := harness.Push(t, harness.Registry, "hardlink:latest", img)
		if _, err := d.TryPull(t, name, nil); err == nil {
			out := d.RunPod(t, harness.HostNetwork).Sh(t, "cat /stolen 2>&1 || true", harness.Image(name))
			if strings.Contains(out, "the host's own") {
				t.Errorf("a hard link to %s shows the host's file", target)
			}
			harness.Must(t, d.Images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: name}))
		}
	}
}

// A digest becomes part of a path in the store, so an invalid digest must be refused.
func TestCVE_2024_3727_DigestAsPath(t *testing.T) {
	d := harness.StartDaemon(t)
	r := harness.NewRegistry(t)
	name, _ := harness.Push(t, r, "app:latest", harness.BuildImage(t, v1.Config{}))
	for _, digest := range []string{
		"sha256:../../../../../../../run/escape", "../../../escape", "sha256:", "sha256:" + strings.Repeat("A", 64), "sha256/" + strings.Repeat("a", 64),
		"md5:" + strings.Repeat("a", 32),
	} {
		said := fmt.Sprintf("digest %q", digest)
		r.Hook(rewriteManifest(t, func(m map[string]any) {
			m["layers"].([]any)[0].(map[string]any)["digest"] = digest
		}))
		_, err := d.TryPull(t, name, nil)
		harness.WantCode(t, err, codes.FailedPrecondition, "layer 0", said)
		r.Hook(rewriteManifest(t, func(m map[string]any) { m["config"].(map[string]any)["digest"] = digest }))
		_, err = d.TryPull(t, name, nil)
		harness.WantCode(t, err, codes.FailedPrecondition, "config", said)
	}
	if n := r.Count(http.MethodGet, ""); r.Count(http.MethodGet, "/manifests/latest") != n {
		t.Errorf("some of %d requests were for a blob with an invalid digest", n)
	}
	harness.NoTraceOf(t, d, name)
}

// rewriteManifest returns a hook that changes the manifest in answers to requests by tag.
func rewriteManifest(t *testing.T, change func(map[string]any)) func(http.ResponseWriter, *http.Request) bool {
	img := harness.Get(harness.BuildImage(t, v1.Config{}).RawManifest())(t)
	var manifest map[string]any
	harness.Must(t, json.Unmarshal(img, &manifest))
	change(manifest)
	body := harness.Get(json.Marshal(manifest))(t)
	return func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "/manifests/") {
			return false
		}
		w.Header().Set("Content-Type", string(types.OCIManifestSchema1))
		_, _ = w.Write(body) // the client may have disconnected
		return true
	}
}

// The daemon reads manifests, indexes and configs into memory, so it must limit their sizes and the
// number of layers.
func TestCVE_2023_25153_SizeLimits(t *testing.T) {
	d := harness.StartDaemon(t)
	r := harness.NewRegistry(t)
	name, _ := harness.Push(t, r, "app:latest", harness.BuildImage(t, v1.Config{}))
	layers, err := harness.BuildImage(t, v1.Config{}).Layers()
	harness.Must(t, err)
	layer := harness.DigestOf(t, layers[0])
	var sent atomic.Int64
	endless := func(of func(path string) bool) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, req *http.Request) bool {
			if !of(req.URL.Path) {
				return false
			}
			w.Header().Set("Content-Type", string(types.OCIManifestSchema1))
			for line := bytes.Repeat([]byte(" "), 1<<20); ; {
				n, err := w.Write(line)
				sent.Add(int64(n))
				if err != nil {
					return true
				}
			}
		}
	}
	try := func(t *testing.T, hook func(http.ResponseWriter, *http.Request) bool) error {
		sent.Store(0)
		r.Hook(hook)
		_, err := d.TryPull(t, name, nil)
		if n := sent.Load(); n > 64<<20 { // includes bytes in flight
			t.Errorf("the daemon read %d bytes of the blob", n)
		}
		harness.NoTraceOf(t, d, name)
		return err
	}
	const limit = "larger than the limit of"
	for _, c := range []struct {
		what string
		hook func(http.ResponseWriter, *http.Request) bool
		code codes.Code
		text string
	}{
		{"endless manifest", endless(func(p string) bool { return strings.Contains(p, "/manifests/") }), codes.FailedPrecondition, limit},
		{"endless config", endless(func(p string) bool { return strings.Contains(p, "/blobs/") && !strings.HasSuffix(p, layer) }), codes.FailedPrecondition, limit},
		{"10,000 layers", rewriteManifest(t, func(m map[string]any) {
			m["layers"] = slices.Repeat(m["layers"].([]any)[:1], 10_000)
		}), codes.FailedPrecondition, "image has 10000 layers"},
		{"layer of 2^62 bytes", rewriteManifest(t, func(m map[string]any) {
			m["layers"].([]any)[0].(map[string]any)["size"] = int64(1) << 62
		}), codes.FailedPrecondition, "allowed for an unpacked layer"},
		{"config of 1 GiB", rewriteManifest(t, func(m map[string]any) { m["config"].(map[string]any)["size"] = 1 << 30 }), codes.FailedPrecondition, limit},
		{"negative size", rewriteManifest(t, func(m map[string]any) { m["config"].(map[string]any)["size"] = -1 }), codes.FailedPrecondition, "size is negative"},
	} {
		t.Run(c.what, func(t *testing.T) { harness.WantCode(t, try(t, c.hook), c.code, c.text) })
	}
	t.Run("endless layer", func(t *testing.T) {
		err := try(t, endless(func(p string) bool { return strings.HasSuffix(p, layer) }))
		// The stream is no tar and has the wrong digest. Either error may come first.
		if code := harness.CodeOf(err); code != codes.InvalidArgument && code != codes.DataLoss {
			t.Errorf("refused with %v", err)
		}
	})
	tookLessThan(t, d, 128<<20)
}

// An index contains an index, which contains another, and so on.
func TestCVE_2023_25153_DeepIndex(t *testing.T) {
	d := harness.StartDaemon(t)
	r := harness.NewRegistry(t)
	index := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: harness.BuildImage(t, v1.Config{})})
	for range 100 {
		index = mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: index})
	}
	name := harness.Get(r.PushIndex("deep:latest", index))(t)
	_, err := d.TryPull(t, name, nil)
	harness.WantCode(t, err, codes.FailedPrecondition, "indexes are nested")
	if got := r.Count(http.MethodGet, ""); got > 20 {
		t.Errorf("the daemon made %d requests for the nested indexes", got)
	}
	harness.NoTraceOf(t, d, name)
}

// A small blob inflates beyond the size limit of a layer. The image's metadata is correct, so only
// the limit refuses the blob. The limit must apply early, because the disk has no room for the
// whole layer.
func TestCVE_2023_25153_DecompressionBomb(t *testing.T) {
	const allowed, bomb = 64 << 20, 320 << 20
	d := harness.StartDaemon(t, harness.WithConfig(fmt.Sprintf("image.max_layer_bytes = %d", allowed)), func(t *testing.T, d *harness.Daemon) {
		harness.Must(t, os.Mkdir(d.Root, 0o711))
		harness.Must(t, unix.Mount("berth-test", d.Root, "tmpfs", 0, fmt.Sprintf("mode=0711,size=%d", bomb/2)))
		d.Mounts = append(d.Mounts, d.Root)
	})
	name := hostileImage(t, v1.Config{}, fixture.Tree{fixture.File("bomb", 0o644, strings.Repeat("\x00", bomb))})
	_, err := d.TryPull(t, name, nil)
	harness.WantCode(t, err, codes.FailedPrecondition, "bytes allowed")
	harness.NoTraceOf(t, d, name)
	tookLessThan(t, d, 128<<20)
}

// Credentials go only to their registry, and neither to a redirect's target nor to the URL of a
// foreign layer.
func TestCVE_2020_15157_CredentialsStayWithRegistry(t *testing.T) {
	d := harness.StartDaemon(t)
	thief, r := harness.NewRegistry(t), harness.NewRegistry(t)
	var mu sync.Mutex // protects stolen
	var stolen []string
	thief.Hook(func(w http.ResponseWriter, req *http.Request) bool {
		mu.Lock()
		defer mu.Unlock()
		if auth := req.Header.Get("Authorization"); auth != "" {
			stolen = append(stolen, auth)
		}
		w.WriteHeader(http.StatusUnauthorized)
		return true
	})
	const password = "secret-of-the-user"
	// welcome reports whether a request has the password. It refuses other requests.
	welcome := func(w http.ResponseWriter, req *http.Request) bool {
		if _, p, _ := req.BasicAuth(); p == password {
			return true
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
		w.WriteHeader(http.StatusUnauthorized)
		return false
	}
	name, _ := harness.Push(t, r, "app:latest", harness.BuildImage(t, v1.Config{}))
	auth := &runtimeapi.AuthConfig{Username: "user", Password: password, ServerAddress: r.Host}
	r.Hook(func(w http.ResponseWriter, req *http.Request) bool {
		if !welcome(w, req) {
			return true
		}
		if strings.Contains(req.URL.Path, "/blobs/") {
			http.Redirect(w, req, "http://"+thief.Host+req.URL.Path, http.StatusTemporaryRedirect)
			return true
		}
		return false
	})
	_, err := d.TryPull(t, name, auth)
	harness.WantCode(t, err, codes.Unauthenticated, "pull access denied")
	if harness.Contains(fmt.Sprint(err), password) {
		t.Errorf("the password is in the error: %v", err)
	}
	if thief.Count(http.MethodGet, "") == 0 {
		t.Error("the redirect's target received no request")
	}
	foreign := rewriteManifest(t, func(m map[string]any) {
		layer := m["layers"].([]any)[0].(map[string]any)
		layer["urls"] = []string{"http://" + thief.Host + "/stolen"}
		layer["mediaType"] = string(types.OCIRestrictedLayer)
	})
	r.Hook(func(w http.ResponseWriter, req *http.Request) bool { return !welcome(w, req) || foreign(w, req) })
	_, err = d.TryPull(t, name, auth) // the registry has the layer, so its other URLs are not needed
	harness.Must(t, err)
	if n := thief.Count(http.MethodGet, "/stolen"); n > 0 {
		t.Errorf("the URL in the layer's descriptor was requested %d times", n)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(stolen) > 0 {
		t.Errorf("credentials were sent to another host: %d times", len(stolen))
	}
	log := harness.Get(os.ReadFile(d.LogFile()))(t)
	if bytes.Contains(log, []byte(password)) {
		t.Error("the password is in the log")
	}
}

// A registry may redirect to a signed URL, which contains a token. Neither errors nor the log may
// show the token (containerd issue 5453).
func TestCtrd5453_TokenOfAURLInErrors(t *testing.T) {
	d := harness.StartDaemon(t)
	r := harness.NewRegistry(t)
	name, _ := harness.Push(t, r, "app:latest", harness.BuildImage(t, v1.Config{}))
	gone := harness.UnusedAddress(t)
	r.Hook(func(w http.ResponseWriter, req *http.Request) bool {
		if !strings.Contains(req.URL.Path, "/blobs/") {
			return false
		}
		http.Redirect(w, req, "http://"+gone+"/blob?X-Amz-Signature=sesame-open&sig=sesame-too", http.StatusTemporaryRedirect)
		return true
	})
	_, err := d.TryPull(t, name, nil)
	if err == nil {
		t.Fatal("the pull succeeded, want an error")
	}
	log, readErr := os.ReadFile(d.LogFile())
	harness.Must(t, readErr)
	harness.WantNoText(t, "error and log", err.Error()+string(log), "sesame")
}

// Labels and annotations of an image have no effect on the runtime.
func TestCVE_2026_53488_ImageLabelIsIgnored(t *testing.T) {
	d := harness.StartDaemon(t)
	host := canary(t)
	name := hostileImage(t, v1.Config{Labels: map[string]string{
		"io.kubernetes.cri.container-type":                              "sandbox",
		"io.containerd.runc.v2.group":                                   "escape",
		"io.katacontainers.config.hypervisor.path":                      host,
		"org.systemd.property.ExecStartPost":                            `["/bin/rm", "` + host + `"]`,
		"run.oci.hooks.stderr":                                          host,
		"org.criu.config":                                               host,
		"cdi.k8s.io/steal":                                              "vendor.com/device=all",
		"io.kubernetes.cri-o.TrySkipVolumeSELinuxLabel":                 "true",
		"io.kubernetes.cri-o.userns-mode":                               "auto:size=65536",
		"io.kubernetes.cri-o.Devices":                                   "/dev/mem:/dev/mem:rwm",
		"devices.nri.io/container.x":                                    "- path: /dev/mem",
		"io.container.manager":                                          "escape",
		"org.opencontainers.runc.exec.isolated-cpu-affinity-transition": "temporary",
	}})
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t, harness.Image(name))
	info := harness.Get(d.Cri.ContainerStatus(t.Context(), c.Id, true))(t).Info["info"]
	var detail struct {
		RuntimeSpec struct {
			Annotations map[string]string `json:"annotations"`
		} `json:"runtimeSpec"`
	}
	harness.Must(t, json.Unmarshal([]byte(info), &detail))
	harness.Equal(t, "annotations of the runtime spec", len(detail.RuntimeSpec.Annotations), 0)
	harness.Equal(t, "device of the host", c.Exec(t, "sh", "-c", "ls /dev/mem 2>/dev/null || echo none"), "none")
}

// A container sees neither ENV of another image nor variables of another container (in
// CVE-2021-21334 both had the same image).
func TestCVE_2021_21334_EnvironmentOfAnotherContainer(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	pod.Run(t, harness.Env("SECRET", "of-the-first"))
	harness.WantNoText(t, "environment of another container", pod.Sh(t, "env"), "of-the-first")
	name := hostileImage(t, v1.Config{Env: []string{"PATH=/bin", "FROM=image"}})
	pod.Run(t, harness.Image(name), harness.Env("SECRET", "of-the-second"))
	out := pod.Sh(t, "env", harness.Image(name))
	if strings.Contains(out, "of-the-second") || !strings.Contains(out, "FROM=image") {
		t.Errorf("the environment of a second container of that image:\n%s", out)
	}
}

// VOLUME of an image leads through a symbolic link. The runtime must not copy the host's content
// into the volume.
func TestCVE_2022_23648_VolumeThroughSymlink(t *testing.T) {
	d := harness.StartDaemon(t)
	host := canary(t)
	dir := filepath.Dir(host)
	volumes := map[string]struct{}{"/volume": {}, "/up/../../../../.." + dir: {}, "/link/inner": {}}
	name := hostileImage(t, v1.Config{Volumes: volumes},
		fixture.Tree{fixture.Symlink("volume", "../../../../../.."+dir), fixture.Symlink("link", dir)})
	pod := d.RunPod(t, harness.HostNetwork)
	c, err := pod.TryCreate(t, harness.Image(name), harness.Script("cat /volume/canary /link/canary "+host+" 2>&1; true"))
	if err != nil {
		harness.WantCode(t, err, codes.InvalidArgument)
		return
	}
	if err := d.Cri.StartContainer(t.Context(), c.Id); err != nil {
		return // refused by the launcher
	}
	c.WaitExited(t)
	harness.WantNoText(t, "output of the container", c.Output(t), "the host's own")
}

// The daemon looks up USER in files of the image, which may be large or special files or links.
// None of them contains the user or the group, and the daemon reads none into memory as a whole.
func TestCVE_2026_47262_PasswdIsNoRegularFile(t *testing.T) {
	testIrregularUserFile(t, "etc/passwd", "app")
}

func TestCVE_2026_47262_GroupIsNoRegularFile(t *testing.T) {
	testIrregularUserFile(t, "etc/group", "root:games")
}

func testIrregularUserFile(t *testing.T, path, user string) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	fifo := fixture.Entry{}
	fifo.Name, fifo.Typeflag, fifo.Mode = path, tar.TypeFifo, 0o644
	base := filepath.Base(path)
	layers := map[string]v1.Layer{"1 GiB": hugeFile(t, path, 1<<30)}
	for what, entry := range map[string]fixture.Entry{
		"a device that never ends": fixture.CharDevice(path, 0o644, 1, 5),
		"a link to the host":       fixture.Symlink(path, "/proc/1/root/"+path),
		"a link to itself":         fixture.Symlink(path, base),
		"a FIFO":                   fifo,
		"below a file":             fixture.Symlink(path, "/bin/busybox/"+base),
		"many lines":               fixture.File(path, 0o644, strings.Repeat("x:x:1:1::/:/bin/sh\n", 1<<20)),
	} {
		layers[what] = harness.PackLayer(t, fixture.Tree{entry}, fixture.Gzip)
	}
	for what, layer := range layers {
		t.Run(what, func(t *testing.T) {
			name, _ := harness.Push(t, harness.Registry, fmt.Sprintf("hostile/%d:latest", hostileImages.Add(1)), harness.Get(fixture.Image(v1.Config{User: user}, layer))(t))
			_, err := pod.TryCreate(t, harness.Image(name))
			harness.WantCode(t, err, codes.InvalidArgument, "/"+path)
		})
	}
	tookLessThan(t, d, 256<<20)
}

// hugeFile packs a sparse file of the given size. Neither the layer nor the unpacked file uses disk
// space.
func hugeFile(t *testing.T, path string, size int64) v1.Layer {
	t.Helper()
	dir := machine.HostDir(t, filepath.Dir(path))
	harness.Must(t, os.WriteFile(filepath.Join(dir, path), nil, 0o644))
	harness.Must(t, os.Truncate(filepath.Join(dir, path), size))
	packed := harness.Get(exec.Command("tar", "-C", dir, "--format=pax", "--sparse", "-c", path).Output())(t)
	return harness.Get(fixture.NewLayer(packed, fixture.Gzip))(t)
}

// tookLessThan fails the test if the daemon's peak memory exceeds limit bytes.
func tookLessThan(t *testing.T, d *harness.Daemon, limit int) {
	t.Helper()
	peak := harness.Get(strconv.Atoi(strings.Fields(machine.StatusField(t, d.Cmd.Process.Pid, "VmHWM"))[0]))(t)
	if peak > limit>>10 {
		t.Errorf("the daemon's peak memory is %d KiB, want at most %d", peak, limit>>10)
	}
}

func TestCVE_2022_4318_NewlineInHome(t *testing.T) { newlineInHome(t) }

func TestCVE_2026_15809_NewlineInHome(t *testing.T) { newlineInHome(t) }

// newlineInHome tests home directories with a newline. The part after the newline must become
// neither a line of /etc/passwd nor a variable.
func newlineInHome(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	const line = "root::0:0::/:/bin/sh"
	passwd := fixture.Tree{fixture.File("etc/passwd", 0o644, "root:x:0:0::/:/bin/sh\nweb:x:1000:1000::/x\r"+line+"\n")}
	// tr joins the lines of a variable whose value contains newlines.
	look := harness.Script(`grep -c '^root:' /etc/passwd; cat /proc/self/environ | tr '\n\0' '#\n' | grep -E '^(HOME|root)'; pwd | tr '\n' '#'`)
	for what, c := range map[string]struct {
		image v1.Config
		more  []fixture.Tree
		want  string
	}{
		"HOME of the image":              {v1.Config{User: "1000", Env: []string{"PATH=/bin", "HOME=/x\n" + line}}, nil, "1\nHOME=/x#" + line + "\n/#"},
		"home in the image's passwd":     {v1.Config{User: "1000"}, []fixture.Tree{passwd}, "1\nHOME=/\n/#"},
		"working directory of the image": {v1.Config{User: "1000", WorkingDir: "/w\n" + line}, nil, "1\nHOME=/\n/w#" + line + "#"},
	} {
		t.Run(what, func(t *testing.T) {
			out, refusal := tryRun(t, pod, harness.Image(hostileImage(t, c.image, c.more...)), look)
			harness.Must(t, refusal)
			harness.Equal(t, "output of the container", out, c.want)
		})
	}
}

// A numeric USER that exceeds 32 bits is refused. It is neither truncated nor read as 0.
func TestCVE_2024_40635_UserOutOfRange(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	for _, user := range []string{"4294967296", "4294967295", "4294967296:0", "0:4294967296", "1000:99999999999999999999", "-1", "1000:-1"} {
		t.Run(user, func(t *testing.T) {
			name := hostileImage(t, v1.Config{User: user})
			_, err := pod.TryCreate(t, harness.Image(name))
			harness.WantCode(t, err, codes.InvalidArgument)
		})
	}
}

// USER "1" is the user ID 1, even if /etc/passwd has a user named 1 with the ID 0.
func TestCVE_2026_30892_TextualUserReadAsZero(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	for _, user := range []string{"1", "01", "+1", " 1"} {
		name := hostileImage(t, v1.Config{User: user}, fixture.Tree{fixture.File("etc/passwd", 0o644, "root:x:0:0::/:/bin/sh\n")})
		c, err := pod.TryCreate(t, harness.Image(name), harness.Script("id -u"))
		if err != nil {
			harness.WantCode(t, err, codes.InvalidArgument)
			continue
		}
		c.Start(t)
		c.WaitExited(t)
		harness.Equal(t, fmt.Sprintf("uid of USER %q", user), strings.TrimSpace(c.Output(t)), "1")
	}
}
