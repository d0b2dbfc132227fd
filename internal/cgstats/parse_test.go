package cgstats

import (
	"bytes"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/testutil"
)

func TestParseNumbers(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]struct {
		v  uint64
		ok bool
	}{
		"0\n": {0, true}, "4096\n": {4096, true}, "4096": {4096, true},
		"18446744073709551615\n": {math.MaxUint64, true}, "18446744073709551616\n": {0, false},
		"": {0, false}, "\n": {0, false}, "max\n": {0, false}, "-1\n": {0, false}, "1 2": {0, false}, "0x10": {0, false},
	} {
		if v, ok := parseUint([]byte(in)); ok != want.ok || ok && v != want.v {
			t.Errorf("parseUint(%q): %d, %v", in, v, ok)
		}
	}
	for in, want := range map[string]uint64{"max\n": Unlimited, "-1\n": Unlimited, "9223372036854771712\n": Unlimited, "67108864\n": 64 << 20, "0\n": 0} {
		if v, ok := parseLimit([]byte(in)); !ok || v != want {
			t.Errorf("parseLimit(%q): %d, %v", in, v, ok)
		}
	}
}

func TestParsePressure(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]Pressure{
		"some avg10=51.50 avg60=34.33 avg300=22.67 total=188490071\nfull avg10=0.00 avg60=0.05 avg300=100.00 total=1024880\n": {Known: true,
			Some: Stall{51.5, 34.33, 22.67, 188490071000}, Full: Stall{0, 0.05, 100, 1024880000}},
		// cpu.pressure before Linux 5.13 has no second line.
		"some avg10=0.00 avg60=0.00 avg300=0.00 total=3\n": {Known: true, Some: Stall{Total: 3000}},
		"": {},
	} {
		if p := parsePressure([]byte(in)); p != want {
			t.Errorf("%q:\n got %+v\nwant %+v", in, p, want)
		}
	}
}

func TestParseInterfaces(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("testdata/net-dev")
	testutil.Must(t, err)
	want := []Interface{
		{Name: "eth0", Rx: Traffic{1296, 16, 1, 2}, Tx: Traffic{1016, 12, 7, 8}},
		{Name: "net1.100", Rx: Traffic{math.MaxUint64, 1, 0, 0}, Tx: Traffic{2, 3, 0, 0}},
	}
	if got := parseInterfaces(b, nil); !slices.Equal(got, want) {
		t.Errorf("got %+v", got)
	}
}

// FuzzParsers checks that no parser panics or invents values for any input.
func FuzzParsers(f *testing.F) {
	files, err := filepath.Glob("testdata/*/*")
	if err != nil {
		f.Fatal(err)
	}
	f.Add([]byte("a\xff\xfe: 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0\n"))
	for _, name := range append(files, "testdata/net-dev") {
		b, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var s Sample
		var d Detail
		parseCPUStat(b, &s.CPU)
		parseMemoryStatV1(b, &s.Memory)
		parseMemoryStatV2(b, &s.Memory)
		parseEvents(b, &d)
		parseLimit(b)
		if p := parsePressure(b); !p.Known && p != (Pressure{}) {
			t.Errorf("pressure from empty input: %+v", p)
		}
		if n, lines := len(parseIOStat(b, nil)), bytes.Count(b, newline)+1; n > lines {
			t.Errorf("%d devices in %d lines", n, lines)
		}
		devices := parseBlkio(b, nil, setBytes)
		for i, a := range devices {
			for _, b := range devices[i+1:] {
				if a.Major == b.Major && a.Minor == b.Minor {
					t.Errorf("device %d:%d twice", a.Major, a.Minor)
				}
			}
		}
		for _, i := range parseInterfaces(b, nil) {
			if i.Name == "" || i.Name == "lo" {
				t.Errorf("interface %q", i.Name)
			}
			if _, err := proto.Marshal(&runtimeapi.NetworkInterfaceUsage{Name: i.Name}); err != nil {
				t.Error(err)
			}
		}
	})
}

func TestParsersAllocateNothing(t *testing.T) {
	files := map[string][]byte{}
	for _, name := range []string{"v2/cpu.stat", "v2/memory.stat", "v1/memory.stat", "v2/cpu.pressure"} {
		b, err := os.ReadFile("testdata/" + name)
		testutil.Must(t, err)
		files[name] = b
	}
	var s Sample
	n := testing.AllocsPerRun(100, func() {
		parseCPUStat(files["v2/cpu.stat"], &s.CPU)
		parseMemoryStatV2(files["v2/memory.stat"], &s.Memory)
		parseMemoryStatV1(files["v1/memory.stat"], &s.Memory)
		s.CPU.Pressure = parsePressure(files["v2/cpu.pressure"])
	})
	if n != 0 {
		t.Errorf("%v allocations", n)
	}
}
