package cgroup

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestParsePressure(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		text   string
		want   Pressure
		failed bool
	}{
		"io": {
			text: "some avg10=12.50 avg60=1.00 avg300=0.10 total=4321\nfull avg10=99.00 avg60=0 avg300=0 total=7\n",
			want: Pressure{Waited: 4321 * time.Microsecond, Recent: 0.125},
		},
		"one line":       {text: "some avg10=0.00 avg60=0.00 avg300=0.00 total=0", want: Pressure{}},
		"more keys":      {text: "some avg10=1.00 new=x total=1000000", want: Pressure{Waited: time.Second, Recent: 0.01}},
		"empty":          {failed: true},
		"another format": {text: "full avg10=0.00 total=0", failed: true},
		"not a number":   {text: "some avg10=0.00 total=many", failed: true},
		"not a share":    {text: "some avg10=x total=0", failed: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := parsePressure(c.text)
			if (err != nil) != c.failed || err == nil && got != c.want {
				t.Errorf("got %+v, %v; want %+v", got, err, c.want)
			}
		})
	}
}

func TestReadPressure(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "kubepods"), 0o700); err != nil {
		t.Fatal(err)
	}
	text := []byte("some avg10=5.00 avg60=0.00 avg300=0.00 total=10\n")
	if err := os.WriteFile(filepath.Join(root, "kubepods", "io.pressure"), text, 0o600); err != nil {
		t.Fatal(err)
	}
	if p, ok, err := ReadPressure(root, "kubepods", "io"); err != nil || !ok || p.Recent != 0.05 {
		t.Errorf("got %+v, %v, %v", p, ok, err)
	}
	if p, ok, err := ReadPressure(root, "kubepods", "memory"); err != nil || ok {
		t.Errorf("a missing file: got %+v, %v, %v", p, ok, err)
	}
}

func TestTop(t *testing.T) {
	t.Parallel()
	for parent, want := range map[string]string{
		"/kubepods/burstable/pod1":            "kubepods",
		"/kubepods.slice/kubepods-pod1.slice": "kubepods.slice",
		"kubepods-besteffort-pod1.slice":      "kubepods.slice",
		"kubepods.slice":                      "kubepods.slice",
		"/berth":                              "berth",
		"":                                    "",
		"/machine.slice/kubepods/besteffort/pod1":         "machine.slice",
		"/a-b.slice/a-b-c.slice":                          "a.slice",
		"kubepods-pod1_2.slice/cri-berth-123.scope/other": "kubepods.slice",
	} {
		t.Run(parent, func(t *testing.T) {
			t.Parallel()
			if got := Top(parent); got != want {
				t.Errorf("got %q, want %q", got, want)
			}
		})
	}
}

func TestReadPressureOfThisKernel(t *testing.T) {
	t.Parallel()
	if _, err := os.Stat("/proc/pressure/io"); err != nil {
		t.Skipf("this kernel does not measure pressure: %v", err)
	}
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		if _, err := os.Stat(filepath.Join(root, "cgroup.controllers")); err != nil {
			continue
		}
		for _, resource := range []string{"cpu", "io", "memory"} {
			p, ok, err := ReadPressure(root, "", resource)
			if err != nil || !ok || p.Recent < 0 || p.Recent > 1 || resource == "cpu" && p.Waited == 0 {
				t.Errorf("%s in %s: %+v, %v, %v", resource, root, p, ok, err)
			}
		}
		return
	}
	t.Skip("cgroup v2 is not mounted")
}
