package debug

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"berth/cmd/config"
)

// programWords is the masker that knows the words of this test's program. Secrets in the tests are
// made at run time, because literals are among these words.
var programWords = sync.OnceValues(func() (*masker, error) { return newMasker("/proc/self/exe") })

func knowing(t *testing.T, names ...string) *masker {
	t.Helper()
	m, err := programWords()
	if err != nil {
		t.Fatal(err)
	}
	return m.with(names...)
}

const (
	letters      = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
	alphanumeric = letters + "0123456789"
	printable    = alphanumeric + "!#$%&()*+,-./:;<=>?@[]^_{|}~"
)

func draw(r *rand.Rand, n int, from string) string {
	b := make([]byte, n)
	for i := range b {
		b[i] = from[r.IntN(len(from))]
	}
	return string(b)
}

func drawBytes(r *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// secrets makes secrets of each kind.
var secrets = map[string]func(*rand.Rand) string{
	"password":   func(r *rand.Rand) string { return draw(r, 12, printable) },
	"letters":    func(r *rand.Rand) string { return draw(r, 12, letters) },
	"lower case": func(r *rand.Rand) string { return draw(r, 10, letters[:26]) },
	"recovery": func(r *rand.Rand) string {
		return draw(r, 4, letters[:26]) + "-" + draw(r, 5, alphanumeric) + "-" + draw(r, 4, letters[:26])
	},
	"hex":       func(r *rand.Rand) string { return hex.EncodeToString(drawBytes(r, 32)) },
	"short hex": func(r *rand.Rand) string { return hex.EncodeToString(drawBytes(r, 8)) },
	"base64":    func(r *rand.Rand) string { return base64.StdEncoding.EncodeToString(drawBytes(r, 32)) },
	"base64url": func(r *rand.Rand) string { return base64.RawURLEncoding.EncodeToString(drawBytes(r, 33)) },
	"digits":    func(r *rand.Rand) string { return "7" + draw(r, 15, "0123456789") },
	"github":    func(r *rand.Rand) string { return "ghp_" + draw(r, 36, alphanumeric) },
	"gitlab":    func(r *rand.Rand) string { return "glpat-" + draw(r, 20, alphanumeric) },
	"aws":       func(r *rand.Rand) string { return "AKIA" + draw(r, 16, letters[26:]) },
	"slack": func(r *rand.Rand) string {
		return "xoxb-" + draw(r, 12, "0123456789") + "-" + draw(r, 24, alphanumeric)
	},
	"slack hook": func(r *rand.Rand) string {
		return "T" + draw(r, 8, alphanumeric) + "/B" + draw(r, 8, alphanumeric) + "/" + draw(r, 24, alphanumeric)
	},
	"kubeadm": func(r *rand.Rand) string { return draw(r, 6, alphanumeric) + "." + draw(r, 16, alphanumeric) },
	"age":     func(r *rand.Rand) string { return "AGE-SECRET-KEY-1" + draw(r, 58, letters[26:]) },
	"uuid": func(r *rand.Rand) string {
		x := hex.EncodeToString(drawBytes(r, 16))
		return x[:8] + "-" + x[8:12] + "-" + x[12:16] + "-" + x[16:]
	},
	"jwt":    jwt,
	"bcrypt": func(r *rand.Rand) string { return "$2y$10$" + draw(r, 53, alphanumeric+"./") },
	"with at": func(r *rand.Rand) string {
		return draw(r, 7, alphanumeric) + "@" + draw(r, 7, alphanumeric) + "@" + draw(r, 5, letters)
	},
	"with slash":  func(r *rand.Rand) string { return draw(r, 6, letters) + "/" + draw(r, 7, letters) },
	"pem":         pemSecret,
	"escaped pem": func(r *rand.Rand) string { return strings.ReplaceAll(pemSecret(r), "\n", `\n`) },
}

func jwt(r *rand.Rand) string {
	part := func(n int) string { return base64.RawURLEncoding.EncodeToString(drawBytes(r, n)) }
	return "eyJ" + part(24) + ".eyJ" + part(60) + "." + part(32)
}

func pemSecret(r *rand.Rand) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: drawBytes(r, 100)}))
}

// passphrases consist of known words, so only the name in front of them gives them away.
var passphrases = []string{"connection refused container", "known-words", "image", "1234"}

// surroundings of a secret in free text.
var surroundings = []string{
	"%s", "got %s", "bad value %s: no such file", "(%s)", "'%s'", `"%s"`, "{%s}", "x=%s", "x:%s", "x: %s,",
	"Authorization: Basic %s", "Authorization: Bearer %s", "curl -u admin:%s", "--value=%s", "--value %s",
	"https://admin:%s@registry.example/v2/", "https://%s@registry.example", "https://registry.example/v2/%s/blobs",
	"https://registry.example/v2/?X-Amz-Signature=%s", "https://registry.example/x?sp=r&sig=%s&x=1", "see https://r.example/#%s.",
	"/var/lib/%s", "open /etc/%s/file: permission denied", `\"data\":\"%s\"`, "goroutine %s [running]:", "-%s-", "--%s, %s",
}

// named are surroundings of passphrases.
var named = []string{
	"password=%s", "password: %s", `"passphrase": "%s"`, "psk=%s", `{"psk":"%s"}`, "secret: %s", "client_secret=%s", "db_passwd=%s",
	"client-key-data=%s", `\"apiToken\":\"%s\"`, "token=%s", "Cookie: %s", "sig=%s", "X-Amz-Signature=%s", "login='%s'", "wpa_psk = %s",
	"run --db-password %s", "-token %s",
}

// places returns what the bundle makes of a text in each place where it reads free text.
func places(t *testing.T, m *masker, text string) map[string]string {
	t.Helper()
	quoted := encoded(t, text)
	n := &node{mask: m, cfg: config.Default()}
	n.cfg.Handlers = map[string]config.Handler{"x": {Path: "/usr/bin/crun", Args: []string{text}}}
	n.cfg.TracingEndpoint, n.cfg.PinnedImages = text, []string{text}
	line := strings.ReplaceAll(text, "\n", " ")
	all := map[string]string{}
	for name, c := range map[string]struct {
		convert cleaner
		content string
	}{
		"text":            {m.free, text},
		"document":        {m.document, `{"a":{"b":[` + quoted + `]},` + quoted + `:1}`},
		"broken document": {m.document, `{"a":` + text},
		"log":             {m.logLines, "time=2026-01-02T03:04:05.678Z level=WARN msg=" + quoted + " error=" + quoted + " x=1\n"},
		"JSON log":        {m.logLines, `{"level":"INFO","msg":` + quoted + `,"error":` + quoted + "}\n"},
		"journal":         {m.logLines, "2026-01-02T03:04:05+0000 node berth[7]: panic: " + text + "\n"},
		"hosts":           {m.hosts, "[host.\"https://m.example\"]\nx = " + quoted + "\n[host.\"https://m.example\".header]\nserver = [" + quoted + "]\n"},
		"CNI":             {m.network, `{"name":"n","plugins":[{"type":"p","unknown":` + quoted + `,"x":{"mtu":` + quoted + `},"dns":{"domain":` + quoted + `}}]}`},
		"parameters":      {m.free, "quiet x=" + line + " " + line},
		"mounts":          {m.mounts, "36 35 98:0 / /mnt rw - ceph //" + line + " rw,x=" + line},
		"metrics":         {m.samples, "berth_x{a=" + quoted + ",b=\"c\"} 1\n# HELP " + line + "\n"},
		"goroutines":      {m.stacks, "goroutine 1 [" + text + "]:\n" + text + "\nmain.main()\n"},
	} {
		content, err := c.convert([]byte(c.content))
		if err != nil {
			content = clean(m.text(err.Error()))
		}
		all[name] = string(content)
	}
	configuration, err := n.config(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	all["configuration"] = string(configuration)
	all["summary"] = string(m.summary([]result{{name: "x", err: fmt.Errorf("fails: %s", text)}}))
	return all
}

func encoded(t *testing.T, text string) string {
	t.Helper()
	quoted, err := json.Marshal(text)
	if err != nil {
		t.Fatal(err)
	}
	return string(quoted)
}

// fragments returns the sequences of a secret that may not appear. Shorter ones appear by chance.
func fragments(secret string) []string {
	var all []string
	for part := range strings.FieldsFuncSeq(secret, func(r rune) bool { return !strings.ContainsRune(alphanumeric, r) }) {
		n := min(len(part), 8)
		if strings.Trim(part, "0123456789") == "" {
			n = min(len(part), 11)
		}
		for i := 0; n >= 5 && i+n <= len(part); i++ {
			if s := part[i : i+n]; !strings.Contains("PRIVATE BEGIN SECRET", s) {
				all = append(all, s)
			}
		}
	}
	return all
}

func TestNoPlaceShowsSecrets(t *testing.T) {
	t.Parallel()
	m := knowing(t, "registry.example", "/var/lib/berth")
	seed := rand.Uint64()
	for kind, secret := range secrets {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(seed, 1))
			for _, around := range append(surroundings, named...) {
				s := secret(r)
				text := strings.ReplaceAll(around, "%s", s)
				for place, got := range places(t, m, text) {
					for _, part := range fragments(s) {
						if strings.Contains(got, part) {
							t.Fatalf("%s shows %q of %q in %q: %s", place, part, s, text, got)
						}
					}
				}
			}
		})
	}
}

func TestNamedPassphrasesAreRemoved(t *testing.T) {
	t.Parallel()
	m := knowing(t)
	for _, around := range named {
		for _, phrase := range passphrases {
			text := fmt.Sprintf(around, phrase)
			if got := m.text(text); strings.Contains(got, phrase) {
				t.Errorf("%s became %s", text, got)
			}
		}
	}
}

func TestKnownTextStays(t *testing.T) {
	t.Parallel()
	id := strings.Repeat("0123456789abcdef", 4)
	m := knowing(t, id, "web-7d9f8b-x2k", "default", "registry.example", "docker.io/library/nginx:1", "/var/lib/berth")
	for _, text := range []string{
		"no such file or directory",
		"open /var/lib/berth: permission denied",
		`Get "https://registry.example/v2/": dial tcp 10.0.0.1:443: connect: connection refused`,
		"container " + id + " of pod default/web-7d9f8b-x2k: context deadline exceeded",
		"pull image docker.io/library/nginx:1: 503 after 1m30s, 4096 bytes at 2026-01-02T03:04:05Z",
		"sha256:" + id, "fe80::1", "10.83.0.0/16", "go1.26.1", "v1.34.2", "ext4", "",
	} {
		if got := m.text(text); got != text {
			t.Errorf("%q became %q", text, got)
		}
	}
	for name, c := range map[string]struct {
		convert cleaner
		text    string
	}{
		"stacks": {m.stacks, "goroutine 7 [chan receive, 5 minutes]:\nberth/server.(*Server).unary(0xc000, {0x1, 0x2}, 0x1?)\n" +
			"\t/src/server/intercept.go:33 +0x1d\ncreated by net/http.(*Server).Serve in goroutine 1\n"},
		"log": {m.logLines, "time=2026-01-02T03:04:05.678Z level=INFO msg=\"no such file\" namespace=kube-zzqy podName=zzqy pod=" + id[:40] +
			" image=quay.example/zzqy:1 seconds=0.02 error=\"pod kube-zzqy/zzqy: not found\"\n"},
		"metrics": {m.samples, "# TYPE berth_pods gauge\nberth_pods{state=\"ready\"} 1\n"},
	} {
		if got, err := c.convert([]byte(c.text)); err != nil || string(got) != c.text {
			t.Errorf("%s became %s, %v", name, got, err)
		}
	}
}

func TestConfigurationsStayUseful(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cfg := config.Default()
	cfg.RegistryDirs, cfg.CNIConfDir, cfg.CNIBinDirs = []string{dir}, dir, nil
	n := &node{cfg: cfg, mask: knowing(t)}
	writeFile(t, filepath.Join(dir, "r.example", "hosts.toml"),
		"server = 'https://zzqy.example'\n[host.'https://m.zzqy:5000'.header]\nx-anything = ['hidden']\n")
	writeFile(t, filepath.Join(dir, "10-x.conflist"), `{"name":"x","plugins":[{"type":"p","ipam":{"subnet":"10.0.0.0/8"},"mtu":1400}]}`)
	for name, c := range map[string]struct {
		collect collector
		want    []string
	}{
		"registries":    {n.registries, []string{"https://m.zzqy:5000", "https://zzqy.example", removed}},
		"networks":      {n.networks, []string{`"mtu": 1400`, `"type": "p"`, `"10.0.0.0/8"`}},
		"configuration": {n.config, []string{`"listen": "/run/berth/berth.sock"`, `"image.layer_driver": "auto"`, `"stream.idle_timeout": "4h"`}},
	} {
		got, err := c.collect(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range c.want {
			if !strings.Contains(string(got), want) {
				t.Errorf("%s lacks %s: %s", name, want, got)
			}
		}
	}
}

func TestEqualValuesStayEqual(t *testing.T) {
	t.Parallel()
	m := knowing(t)
	one, two := m.text("zzqy-1x and zzqy-1x"), m.text("zzqy-2x")
	if parts := strings.Fields(one); parts[0] != parts[2] || parts[0] == two {
		t.Errorf("%s, %s", one, two)
	}
	if other, err := newMasker(); err != nil || other.secret("x") == m.secret("x") {
		t.Errorf("two bundles have the same key, %v", err)
	}
	if _, err := newMasker(filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v", err)
	}
}
