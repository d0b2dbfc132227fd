package cni

import (
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/testutil"
)

func TestLoadFirstValid(t *testing.T) {
	t.Parallel()
	const single = `{"cniVersion":"0.4.0","name":"single","type":"a"}`
	tests := []struct {
		name    string
		files   map[string]string
		want    string // name of the network
		version string
		skipped []string // file names
		err     string   // expected text of the error without a network
	}{
		{name: "lexical order over all extensions",
			files: map[string]string{"30.conflist": conflist("1.0.0", "third", "a"), "10.json": single, "20.conf": strings.ReplaceAll(single, "single", "second")},
			want:  "single", version: "0.4.0"},
		{name: "other extensions", files: map[string]string{"10.conflist.bak": conflist("1.0.0", "x", "a"), "calico-kubeconfig": ""}, err: "no .conflist, .conf or .json file in"},
		{name: "empty directory", err: "no .conflist, .conf or .json file in"},
		{name: "invalid first", files: map[string]string{"10.conflist": "{", "20.conflist": conflist("1.1.0", "good", "a")},
			want: "good", version: "1.1.0", skipped: []string{"10.conflist"}},
		{name: "all invalid", files: map[string]string{"10.conflist": "{", "20.conf": "null"}, skipped: []string{"10.conflist", "20.conf"}, err: "10.conflist: "},
		{name: "a list needs its extension", files: map[string]string{"10.conf": conflist("1.0.0", "x", "a")}, skipped: []string{"10.conf"}, err: `it has "plugins", so it is a list of plugins: rename it to end with .conflist`},
		{name: "highest of cniVersions that is known",
			files: map[string]string{"1.conflist": `{"cniVersions":["0.3.1","1.0.0","7.0.0"],"name":"n","plugins":[{"type":"a"}]}`}, want: "n", version: "1.0.0"},
		{name: "cniVersions unknown", files: map[string]string{"1.conflist": `{"cniVersions":["7.0.0"],"name":"n","plugins":[{"type":"a"}]}`},
			skipped: []string{"1.conflist"}, err: `none of cniVersions ["7.0.0"] is supported`},
		{name: "cniVersion too new", files: map[string]string{"1.conflist": conflist("2.0.0", "n", "a")}, skipped: []string{"1.conflist"}, err: `cniVersion "2.0.0" is not supported`},
		{name: "oldest usual version", files: map[string]string{"1.conflist": conflist("0.3.1", "n", "a")}, want: "n", version: "0.3.1"},
		{name: "bad name", files: map[string]string{"1.conflist": conflist("1.0.0", "../n", "a")}, skipped: []string{"1.conflist"}, err: "invalid characters found in network name"},
		{name: "no name", files: map[string]string{"1.conf": `{"type":"a"}`}, skipped: []string{"1.conf"}, err: "missing network name"},
		{name: "no plugins", files: map[string]string{"1.conflist": `{"name":"n","cniVersion":"1.0.0"}`}, skipped: []string{"1.conflist"}, err: "no plugins"},
		{name: "plugin type is a path", files: map[string]string{"1.conflist": conflist("1.0.0", "n", "../../bin/sh")}, skipped: []string{"1.conflist"}, err: "is not a file name"},
		{name: "too large", files: map[string]string{"1.conf": strings.Repeat(" ", maxConfSize) + single}, skipped: []string{"1.conf"}, err: "too large"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			for name, content := range tt.files {
				testutil.Must(t, os.WriteFile(dir+"/"+name, []byte(content), 0o644))
			}
			net, skipped, err := load(dir)
			var names []string
			for _, s := range skipped {
				names = append(names, strings.TrimPrefix(s.File, dir+"/"))
			}
			if !slices.Equal(names, tt.skipped) {
				t.Errorf("skipped %q, want %q", names, tt.skipped)
			}
			if tt.err != "" {
				if errdefs.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("error %v (%v), want FailedPrecondition with %q", err, errdefs.Code(err), tt.err)
				}
				return
			}
			testutil.Must(t, err)
			if net.list.Name != tt.want || net.list.CNIVersion != tt.version {
				t.Errorf("network %q version %q, want %q %q", net.list.Name, net.list.CNIVersion, tt.want, tt.version)
			}
		})
	}
}

func TestLoadSkipsSpecialFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	testutil.Must(t, unix.Mkfifo(dir+"/10.conf", 0o644))
	testutil.Must(t, os.Symlink("/dev/zero", dir+"/20.conf"))
	testutil.Must(t, os.Symlink("nowhere", dir+"/30.conf"))
	testutil.Must(t, os.Mkdir(dir+"/40.conf", 0o755))
	testutil.Must(t, os.WriteFile(dir+"/50.conflist", []byte(conflist("1.0.0", "n", "a")), 0o644))
	testutil.Must(t, os.Rename(dir+"/50.conflist", dir+"/target"))
	testutil.Must(t, os.Symlink("target", dir+"/50.conflist")) // as in a projected volume
	net, skipped, err := load(dir)
	testutil.Must(t, err)
	if net.list.Name != "n" || len(skipped) != 3 {
		t.Errorf("network %q, skipped %v", net.list.Name, skipped)
	}
}

// CNI 1.1: plugins of a network may be files in a directory with its name.
func TestLoadPluginFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	testutil.Must(t, os.WriteFile(dir+"/10.conflist", []byte(`{"cniVersion":"1.1.0","name":"n","plugins":[{"type":"a"}]}`), 0o644))
	testutil.Must(t, os.Mkdir(dir+"/n", 0o755))
	testutil.Must(t, os.WriteFile(dir+"/n/20-c.conf", []byte(`{"type":"c","x":1}`), 0o644))
	testutil.Must(t, os.WriteFile(dir+"/n/10-b.conf", []byte(`{"type":"b"}`), 0o644))
	testutil.Must(t, os.WriteFile(dir+"/n/README", nil, 0o644))
	net, _, err := load(dir)
	testutil.Must(t, err)
	stored, err := parseConf(net.list.Bytes, true) // the configuration for DEL
	testutil.Must(t, err)
	var types []string
	for _, p := range stored.Plugins {
		types = append(types, p.Network.Type)
	}
	if want := []string{"a", "b", "c"}; !slices.Equal(types, want) {
		t.Errorf("stored plugins %q, want %q", types, want)
	}

	testutil.Must(t, os.WriteFile(dir+"/10.conflist", []byte(`{"cniVersion":"1.1.0","name":"n","loadOnlyInlinedPlugins":true,"plugins":[{"type":"a"}]}`), 0o644))
	net, _, err = load(dir)
	testutil.Must(t, err)
	if len(net.list.Plugins) != 1 {
		t.Errorf("%d plugins, want the inlined one", len(net.list.Plugins))
	}

	testutil.Must(t, os.WriteFile(dir+"/10.conflist", []byte(`{"cniVersion":"1.1.0","name":"n"}`), 0o644))
	testutil.Must(t, os.WriteFile(dir+"/n/10-b.conf", []byte(`{`), 0o644))
	if _, _, err = load(dir); err == nil || !strings.Contains(err.Error(), "n/10-b.conf") {
		t.Errorf("error %v does not name the broken plugin file", err)
	}
}

func FuzzConf(f *testing.F) {
	f.Add([]byte(conflist("1.1.0", "n", "a", "b")), true)
	f.Add([]byte(`{"cniVersion":"0.4.0","name":"n","type":"a","capabilities":{"portMappings":true},"ipam":{"type":"x"},"dns":{}}`), false)
	f.Add([]byte(`{"cniVersions":["0.3.1","1.0.0",null],"name":"n","disableGC":"true","plugins":[null,{"type":"a"}]}`), true)
	f.Add([]byte(`{"name":1}`), true)
	f.Add([]byte(`null`), false)
	f.Fuzz(func(t *testing.T, data []byte, isList bool) {
		list, err := parseConf(data, isList)
		if err != nil {
			return
		}
		again, err := parseConf(list.Bytes, true)
		if err != nil {
			t.Fatalf("DEL cannot read the configuration of ADD: %v", err)
		}
		if again.Name != list.Name || len(again.Plugins) != len(list.Plugins) {
			t.Fatalf("read %q with %d plugins, stored %q with %d", list.Name, len(list.Plugins), again.Name, len(again.Plugins))
		}
	})
}
