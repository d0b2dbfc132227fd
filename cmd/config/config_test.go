package config

import (
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
)

var update = flag.Bool("update", false, "rewrite docs/config.md")

func TestDefaultsMatchTags(t *testing.T) {
	t.Parallel()
	c := Default()
	want := Config{
		Listen: "/run/berth/berth.sock", Root: "/var/lib/berth", State: "/run/berth",
		CgroupDriver: "auto",
		Network:      "cni", NetworkBridge: "berth0", NetworkSubnets: []string{"10.83.0.0/16", "fdb6:83e7:2d10::/64"}, NetworkRoutes: []string{}, NetworkMasquerade: true,
		NetworkNoMasquerade: []string{},
		CNIConfDir:          "/etc/cni/net.d", CNIBinDirs: []string{"/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"}, NetNSDir: "/run/netns",
		DockerConfig: "", CheckpointRestore: "off", AuthFiles: []string{}, SignatureRegistriesDir: "/etc/containers/registries.d", SignatureMaxPlugins: 10, SignaturePluginTimeout: Duration{10 * time.Second}, RegistryDirs: []string{"/etc/berth/certs.d", "/etc/containerd/certs.d"}, PinnedImages: []string{},
		MaxParallelDownloads: 8, MaxRangeRequests: 16, PullPressureLimit: 20, PeersUploads: 8, PartialLayerTTL: Duration{24 * time.Hour}, PeersSeeds: []string{}, StallTimeout: Duration{time.Minute}, CNITimeout: Duration{110 * time.Second}, WaitLimit: Duration{time.Minute}, PreloadDirs: []string{"/etc/berth/images.d"}, MaxLayerBytes: 256 << 30, MaxLayerEntries: 4 << 20, LazyPolicy: "off", LazyStall: Duration{time.Minute}, LazyMinBytes: 32 << 20, LazyMinTime: Duration{2 * time.Second}, LazyMemory: 64 << 20, IndexBytes: 0, DiskReservePercent: 5, DiskReserveBytes: 4 << 30, WritableLayerProjects: 1 << 30,
		LayerDriver: "auto", ImageVolumes: "bind",
		MaxLogLine: 16384, IdleLaunchers: 2, StatsPeriod: Duration{10 * time.Second}, CDISpecDirs: []string{"/etc/cdi", "/var/run/cdi"}, DefaultHandler: "berth",
		MetricsCollectors: []string{"requests", "starts", "images", "lazy", "containers", "network", "daemon", "go", "process"},
		NRI:               true, NRISocket: "/run/berth/nri/nri.sock", NRIPluginDir: "/opt/nri/plugins", NRIPluginConfigDir: "/etc/nri/conf.d",
		NRIRegistrationTimeout: Duration{5 * time.Second}, NRIRequestTimeout: Duration{5 * time.Second}, NRIReject: []string{}, NRIRequiredPlugins: []string{},
		StreamAddress: "127.0.0.1:0", StreamIdleTimeout: Duration{4 * time.Hour}, MaxExecs: 512, DefaultEnv: []string{}, DefaultUlimits: []string{}, UnsetSeccomp: "unconfined", MaxContainerExecs: 128, MaxSessions: 4096,
		TracingProtocol: "grpc", LogLevel: "info", LogFormat: "text",
	}
	if !reflect.DeepEqual(*c, want) {
		t.Errorf("Default() = %+v\nwant %+v", *c, want)
	}
	if err := c.validate(func(key string) string { return key }); err != nil {
		t.Errorf("the defaults are refused: %v", err)
	}
}

func TestEveryOptionIsDeclared(t *testing.T) {
	t.Parallel()
	keys := map[string]bool{}
	all := options()
	for _, table := range tables() {
		if table.Example == "" {
			t.Errorf("table %s has no example", table.Key)
		}
		all = append(all, option{Key: table.Key, Doc: table.Doc})
		for _, o := range table.Options {
			if o.field.Tag.Get("example") == "" {
				t.Errorf("option %s of %s has no example", o.Key, table.Key)
			}
			o.Key = table.Key + "." + o.Key
			all = append(all, o)
		}
	}
	for _, o := range all {
		if o.Key == "" || o.Doc == "" || !strings.HasSuffix(o.Doc, ".") {
			t.Errorf("option %+v lacks a key or a documentation that is a sentence", o)
		}
		if keys[o.Key] {
			t.Errorf("key %s is declared twice", o.Key)
		}
		keys[o.Key] = true
	}
}

// An option's text has at most 40 words. What else there is to say is on the page that the text
// names.
func TestTextsAreShort(t *testing.T) {
	t.Parallel()
	const limit = 40
	check := func(key, text string) {
		if words := len(strings.Fields(text)); words > limit {
			t.Errorf("the text of %s has %d words, at most %d are allowed", key, words, limit)
		}
	}
	for _, o := range options() {
		check(o.Key, o.Doc)
	}
	for _, table := range tables() {
		check(table.Key, table.Doc)
		for _, o := range table.Options {
			check(table.Key+".NAME."+o.Key, o.Doc)
		}
	}
}

func TestDefaultTOMLRoundTrip(t *testing.T) {
	t.Parallel()
	text := DefaultTOML()
	got, err := Parse("default", []byte(text))
	if err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	if want := Default(); !reflect.DeepEqual(got, want) {
		t.Errorf("parsed back: %+v\nwant %+v", got, want)
	}
	keys := lines([]byte(text))
	for _, o := range options() {
		if keys[o.Key] == 0 {
			t.Errorf("%s is not printed", o.Key)
		}
	}
}

func TestExampleFileIsValid(t *testing.T) {
	t.Parallel()
	const path = "../../contrib/systemd/config.toml"
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	c, err := Parse(path, content)
	if err != nil {
		t.Fatal(err)
	}
	if c.CgroupDriver != "systemd" || len(c.PinnedImages) != 1 {
		t.Errorf("parsed as %+v", c)
	}
}

func TestHandlersAreValidated(t *testing.T) {
	t.Parallel()
	c, err := Parse("f.toml", []byte("default_handler = 'crun'\n[handlers.crun]\npath = '/usr//bin/crun'\nargs = ['--debug']\n[handlers.test-handler]\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]Handler{"crun": {Type: "oci", Path: "/usr/bin/crun", Args: []string{"--debug"}}, "test-handler": {Type: "oci"}}
	if !reflect.DeepEqual(c.Handlers, want) || c.DefaultHandler != "crun" {
		t.Errorf("handlers are %+v, by default %q", c.Handlers, c.DefaultHandler)
	}
}

// TestExamplesOfTables uncomments the tables in the output of "berth config default".
func TestExamplesOfTables(t *testing.T) {
	t.Parallel()
	_, text, found := strings.Cut(DefaultTOML(), "#\n# [handlers.crun]")
	if !found {
		t.Fatal("no example is printed")
	}
	text = "[handlers.crun]" + strings.ReplaceAll(text, "\n#", "\n")
	c, err := Parse("default", []byte(text))
	if err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	if h := c.Handlers["crun"]; h.Path == "" || len(h.Args) == 0 {
		t.Errorf("the example is parsed as %+v", c.Handlers)
	}
}

func TestParseErrors(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		file string
		want []string // all parts of the error
	}{
		"misspelt":         {"root = '/a'\n\nlisen = '/run/x.sock'\n", []string{`f.toml: line 3: unknown key "lisen", the nearest option is "listen"`}},
		"dash":             {"cgroup-driver = 'auto'", []string{`line 1: unknown key "cgroup-driver"`, `"cgroup_driver"`}},
		"two":              {"roott = 1\nx_handler = 2", []string{`line 1: unknown key "roott", the nearest option is "root"`, `line 2: unknown key "x_handler", the nearest option is "handlers"`}},
		"check of sources": {"network.check_source = true", []string{`f.toml: line 1: network.check_source is no longer an option: remove it. Drop`}},
		"isolation":        {"[network]\nisolation = ['pods']", []string{`f.toml: line 2: network.isolation is no longer an option: remove it. Block traffic`}},
		"old isolation":    {"network_isolation = ['pods']", []string{`f.toml: line 1: network_isolation is no longer an option: remove it. Block traffic`}},
		"removed":          {"[checkpoint]\nrestore_foreign = false", []string{`f.toml: line 2: checkpoint.restore_foreign is no longer an option: remove it. `}},
		"removed value":    {"[lazy]\npolicy = 'all'", []string{`f.toml: line 2: lazy.policy: "all" is no longer a value: use "on". `}},
		"in a table":       {"[log]\nlevell = 'info'", []string{`f.toml: line 2: unknown key "log.levell", the nearest option is "log.level"`}},
		"other table":      {"[cni]\nidle_timeout = '1h'", []string{`f.toml: line 2: unknown key "cni.idle_timeout", the nearest option is "stream.idle_timeout"`}},
		"no table":         {"bridge = 'br0'", []string{`f.toml: line 1: unknown key "bridge", the nearest option is "network.bridge"`}},
		"flat key":         {"network_type = 'cni'", []string{`line 1: unknown key "network_type", the nearest option is "network.type"`}},
		"table as value":   {"cni = 'x'", []string{`f.toml: line 1: cni is a table with the options conf_dir, bin_dirs`}},
		"old and new":      {"log_level = 'info'\n[log]\nlevel = 'warn'", []string{"f.toml: line ", "log_level", "log.level", "set the same option"}},
		"inline":           {"\nlog = {level = 'loud'}", []string{`f.toml: line 2: log.level: "loud" is not one of`}},
		"other case":       {"Root = '/a'", []string{`line 1: unknown key "Root", the nearest option is "root"`}},
		"table":            {"[cnii]\nconf_dir = '/x'", []string{`line 1: unknown key "cnii", the nearest option is "cni"`}},
		"known table":      {"[root]\nx = 1", []string{"f.toml: line 1", "root takes a value and is not a table"}},
		"table in value":   {"[stall_timeout]\nDuration = 1", []string{"f.toml: line 1", "stall_timeout"}},
		"dotted":           {"stall_timeout.Duration = 1", []string{"f.toml: line 1", "stall_timeout"}},
		"syntax":           {"root = '/a'\nroot '/b'", []string{"f.toml: line 2"}},
		"twice":            {"root = '/a'\nroot = '/b'", []string{"f.toml: line 2"}},
		"wrong type":       {"\nmax_log_line = 'many'", []string{"f.toml: line 2: max_log_line: it takes a number, found string"}},
		"string for list":  {"cni_bin_dirs = '/opt'", []string{"f.toml: line 1: cni_bin_dirs: it takes a list of strings, found string"}},
		"number in list":   {"cni_bin_dirs = ['/a',\n 5]", []string{"f.toml: line 1: cni_bin_dirs: element 2 of the list is not a string, found integer"}},
		"duration":         {"stall_timeout = 'soon'", []string{"f.toml: line 1", "stall_timeout", `"soon" is not a duration`}},
		"duration number":  {"stall_timeout = 60", []string{`f.toml: line 1: stall_timeout: it takes a duration like "1m30s", found integer`}},
		"short duration":   {"stall_timeout = '10ms'", []string{"f.toml: line 1: pull.stall_timeout: 10ms is shorter than 1s"}},
		"relative":         {"root = 'var/lib'", []string{`f.toml: line 1: root: "var/lib" is not an absolute path`}},
		"relative in list": {"cni_bin_dirs = ['/opt/cni/bin', 'bin']",
			[]string{`f.toml: line 1: cni.bin_dirs: "bin" is not an absolute path`}},
		"empty path":       {"root = ''", []string{"f.toml: line 1: root: the path is empty"}},
		"root directory":   {"state = '/tmp/..'", []string{"f.toml: line 1: state: the path is the root directory"}},
		"empty element":    {"pinned_images = ['a', '']", []string{"f.toml: line 1: image.pinned: element 2 of the list is empty"}},
		"control":          {`root = "/a\nb"`, []string{"f.toml: line 1: root:", "control character"}},
		"not one of":       {"log_level = 'loud'", []string{`f.toml: line 1: log.level: "loud" is not one of debug, info, warn, error`}},
		"too small":        {"max_log_line = 1", []string{"f.toml: line 1: container.max_log_line: 1 is less than 256"}},
		"too large":        {"max_log_line = 1048577", []string{"f.toml: line 1: container.max_log_line: 1048577 is more than 1048576"}},
		"negative":         {"idle_launchers = -1", []string{"f.toml: line 1: container.idle_launchers: -1 is less than 0"}},
		"tcp":              {"listen = 'tcp://0.0.0.0:1'", []string{`f.toml: line 1: listen: "tcp://0.0.0.0:1": only unix sockets are served`}},
		"long socket":      {"listen = '/" + strings.Repeat("x", 107) + "'", []string{"longer than the 107 bytes"}},
		"metrics host":     {"metrics.address = 'localhost:9464'", []string{`f.toml: line 1: metrics.address: "localhost:9464" is not an IP address and a port`}},
		"metrics port":     {"metrics.address = '127.0.0.1'", []string{`f.toml: line 1: metrics.address: "127.0.0.1" is not an IP address and a port`}},
		"metrics socket":   {"metrics.address = 'unix://berth.sock'", []string{`f.toml: line 1: metrics.address: "unix://berth.sock" is not the absolute path`}},
		"same":             {"root = '/x'\nstate = '/x/'", []string{"must be separate directories"}},
		"nested":           {"root = '/x/root'\nstate = '/x'", []string{"must be separate directories"}},
		"ulimit name":      {"container.default_ulimits = ['files=1:2']", []string{`f.toml: line 1: container.default_ulimits: "files=1:2": "files" is not one of core`}},
		"ulimit order":     {"container.default_ulimits = ['nofile=3:2']", []string{`soft limit exceeds`}},
		"ulimit number":    {"container.default_ulimits = ['nofile=1:-2']", []string{`"-2" is not a number`}},
		"ulimit twice":     {"container.default_ulimits = ['nofile=1', 'nofile=2:3']", []string{`"nofile=2:3": the limit is set twice`}},
		"ulimit form":      {"container.default_ulimits = ['nofile']", []string{`the form is NAME=SOFT:HARD`}},
		"variable":         {"container.default_env = ['A=', 'B']", []string{`f.toml: line 1: container.default_env: "B" is not NAME=VALUE`}},
		"variable no name": {"container.default_env = ['=b']", []string{`"=b" is not NAME=VALUE`}},
		"CPUs":             {"container.pause_cpus = '0-1,x'", []string{`container.pause_cpus: "0-1,x" is not a list of CPUs`}},
		"CPUs backwards":   {"container.pause_cpus = '3-1'", []string{`is not a list of CPUs`}},
		"seccomp path":     {"container.seccomp_profile = 'x.json'", []string{`container.seccomp_profile: "x.json" is not an absolute path`}},
		"seccomp unset":    {"container.unset_seccomp_profile = 'default'", []string{`"default" is not one of`}},
		"annotations":      {"[handlers.x]\ncontainer_annotations = ['a']", []string{`handlers.x: the built-in runtime takes no annotations`}},
		"handler path":     {"[handlers.x]\n\npath = 'crun'", []string{`f.toml: line 3: handlers.x.path: "crun" is not an absolute path`}},
		"handler key":      {"[handlers.x]\npaht = '/crun'\nargs = 1", []string{`f.toml: line 2: unknown key "handlers.x.paht", the nearest option is "path"`, "line 3: handlers.x.args: it takes a list of strings, found integer"}},
		"handler dotted":   {"handlers.x.path = 3", []string{`f.toml: line 1: handlers.x.path: it takes a string, found integer`}},
		"handler no name":  {"[handlers]\nx = 1", []string{`f.toml: line 2: handlers.x: it takes tables of the form [handlers.NAME]`}},
		"handler below":    {"[handlers.x.y]\npath = '/crun'", []string{`f.toml: line 1: handlers.x.y: it takes tables`}},
		"handler array":    {"[[handlers.x]]\npath = '/crun'", []string{`f.toml: line 1: handlers.x: it takes tables`}},
		"handler twice":    {"[handlers.x]\n[handlers.x]", []string{"f.toml: line 2"}},
		"handler name":     {"\n[handlers.Crun_1]\npath = '/crun'", []string{`f.toml: line 2: handlers.Crun_1: "Crun_1" is not a name that a RuntimeClass may have`}},
		"handler built in": {"[handlers.berth]", []string{`f.toml: line 1: handlers.berth: berth is the built-in handler`}},
		"handler args":     {"[handlers.x]\nargs = ['--debug']", []string{`f.toml: line 2: handlers.x.args: the built-in runtime takes no options`}},
		"handler arg":      {"[handlers.x]\npath = '/crun'\nargs = ['']", []string{`f.toml: line 3: handlers.x.args: element 1 of the list is empty`}},
		"after a table":    {"[handlers.x]\npath = '/crun'\n[cnj]\na = 1\n[handlers.y]\nz = 1", []string{`f.toml: line 3: unknown key "cnj"`, `line 6: unknown key "handlers.y.z"`}},
		"default handler":  {"default_handler = 'crun'", []string{`f.toml: line 1: default_handler: no handler "crun"`}},
		"two values":       {"root = 'a'\nstate = 'b'", []string{"f.toml: line 1: root:", "f.toml: line 2: state:"}},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := Parse("f.toml", []byte(tc.file))
			if err == nil {
				t.Fatalf("accepted as %+v", c)
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error is\n%v\nwithout\n%s", err, want)
				}
			}
		})
	}
}

func TestParseValues(t *testing.T) {
	t.Parallel()
	c, err := Parse("f", []byte(`
root = "/data//berth/"
cni_bin_dirs = ["/a", "/b/"]
registry_dirs = []
stall_timeout = "1h30m"
listen = "unix:///tmp/x.sock"
`))
	if err != nil {
		t.Fatal(err)
	}
	want := Default()
	want.Root, want.CNIBinDirs, want.RegistryDirs = "/data/berth", []string{"/a", "/b"}, []string{}
	want.StallTimeout, want.Listen = Duration{90 * time.Minute}, "/tmp/x.sock"
	if !reflect.DeepEqual(c, want) {
		t.Errorf("got %+v\nwant %+v", c, want)
	}
}

func TestSocketAcceptsPathAndURL(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"/run/a.sock":         "/run/a.sock",
		"unix:///run/a.sock":  "/run/a.sock",
		"unix:/run/a.sock":    "/run/a.sock",
		"unix://run/a.sock":   "",
		"run/a.sock":          "",
		"http://localhost/":   "",
		"@abstract":           "",
		"unix:@abstract":      "",
		"unix:///run/../a.sk": "/a.sk",
	} {
		got := text
		err := cleanSocket(&got)
		if (err == nil) != (want != "") || err == nil && got != want {
			t.Errorf("%q: %q, %v; want %q", text, got, err, want)
		}
	}
}

// load calls Load as the daemon does.
func load(t *testing.T, args ...string) (*Config, error) {
	t.Helper()
	flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	AddFlags(flags)
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	c, _, err := Load(flags)
	return c, err
}

func writeFile(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.toml")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestFlagsOverrideFile(t *testing.T) {
	t.Parallel()
	path := writeFile(t, "root = '/from/file'\nlog_level = 'warn'\ncni_bin_dirs = ['/file']\n")
	c, err := load(t, "--config", path, "--log-level=debug", "--cni-bin-dir=/one,/two", "--cni-bin-dir", "/three", "--listen=unix:///x/y")
	if err != nil {
		t.Fatal(err)
	}
	want := Default()
	want.Root = "/from/file"
	want.LogLevel, want.CNIBinDirs, want.Listen = "debug", []string{"/one", "/two", "/three"}, "/x/y"
	if !reflect.DeepEqual(c, want) {
		t.Errorf("got %+v\nwant %+v", c, want)
	}
}

func TestLoadErrors(t *testing.T) {
	t.Parallel()
	bad := writeFile(t, "root = 'relative'")
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"missing file":     {[]string{"--config=/does/not/exist.toml"}, "read configuration: open /does/not/exist.toml"},
		"flag named":       {[]string{"--config=" + writeFile(t, ""), "--root=rel"}, `--root: "rel" is not an absolute path`},
		"file named":       {[]string{"--config=" + bad}, bad + `: line 1: root: "relative" is not an absolute path`},
		"flag hides file":  {[]string{"--config=" + bad, "--root=/ok", "--log-format=xml"}, `--log-format: "xml" is not one of text, json`},
		"flag checks list": {[]string{"--config=" + writeFile(t, ""), "--cni-bin-dir=/a", "--cni-bin-dir=b"}, `--cni-bin-dir: "b" is not an absolute path`},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := load(t, tc.args...)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want %s", err, tc.want)
			}
		})
	}
}

func TestFlagsExist(t *testing.T) {
	flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	AddFlags(flags)
	for _, name := range []string{"config", "listen", "root", "state", "cgroup-driver", "cni-conf-dir", "cni-bin-dir", "registry-dir", "log-level", "log-format"} {
		if flags.Lookup(name) == nil {
			t.Errorf("no flag --%s", name)
		}
	}
}

func TestNearestFindsMisspeltOption(t *testing.T) {
	t.Parallel()
	for key, want := range map[string]string{"rot": "root", "statte": "state", "cni.bin_dir": "cni.bin_dirs", "cni_bin_dirs": "cni.bin_dirs", "pinned": "image.pinned"} {
		if got := nearest(key); got != want {
			t.Errorf("nearest(%q) = %q, want %q", key, got, want)
		}
	}
}

// FuzzParse checks that Parse returns a valid configuration or an error, and that a valid
// configuration does not change when written and parsed again.
func FuzzParse(f *testing.F) {
	f.Add([]byte(DefaultTOML()))
	f.Add([]byte("root = '/a'\n[cni]\nx = 1\n"))
	f.Add([]byte("pinned_images = ['a', \"b\\u0041\"]\nstall_timeout = '2h'"))
	f.Add([]byte("listen = 'unix:/x'\nmax_log_line = 0x1000"))
	f.Add([]byte("\xff\x00= = ="))
	f.Fuzz(func(t *testing.T, content []byte) {
		c, err := Parse("fuzz", content)
		if err != nil {
			return
		}
		text := c.TOML(true)
		again, err := Parse("again", []byte(text))
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		if !reflect.DeepEqual(c, again) {
			t.Errorf("%+v became %+v", c, again)
		}
	})
}
