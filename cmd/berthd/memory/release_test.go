package memory

import (
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const smaps = `00400000-00d78000 r-xp 00000000 fe:00 10016263                           /usr/bin/be rth
Size:               9696 kB
Rss:                8000 kB
Private_Dirty:         0 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me 
00d78000-018f1000 r--p 00978000 fe:00 10016263                           /usr/bin/be rth
Size:              11748 kB
Anonymous:             4 kB
018f1000-01969000 rw-p 014f1000 fe:00 10016263                           /usr/bin/be rth
Anonymous:             0 kB
01969000-01a00000 r--p 01569000 fe:00 10016263                           /usr/bin/be rth
Anonymous:             0 kB
01a00000-01b00000 r--p 00000000 00:00 0
Anonymous:             0 kB
7f0000000000-7f0000100000 r-xp 00000000 fe:00 99                         /usr/lib/libc.so
Anonymous:             0 kB
7ffd00000000-7ffd00002000 r-xp 00000000 00:00 0                          [vdso]
Anonymous:             0 kB
`

func TestUnchangedRanges(t *testing.T) {
	got, err := unchangedRanges(strings.NewReader(smaps), "/usr/bin/be rth")
	want := []addressRange{{0x400000, 0xd78000}, {0x1969000, 0x1a00000}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%x, %v; want %x", got, err, want)
	}
	if got, err := unchangedRanges(strings.NewReader("xyz-1 r-xp 0 0 0 /f\n"), "/f"); err == nil {
		t.Errorf("parsed an invalid line as %x", got)
	}
}

func TestReleaseUnmapsPagesOfTheProgram(t *testing.T) {
	before := mappedFiles(t)
	if err := Release(); err != nil {
		t.Fatal(err)
	}
	if after := mappedFiles(t); after >= before {
		t.Errorf("%d kB of files mapped before the release, %d kB after", before, after)
	}
}

// mappedFiles returns how many kB of files this process has mapped and in memory.
func mappedFiles(t *testing.T) int {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	match := regexp.MustCompile(`RssFile:\s+(\d+) kB`).FindSubmatch(status)
	if match == nil {
		t.Fatalf("no RssFile in\n%s", status)
	}
	n, err := strconv.Atoi(string(match[1]))
	if err != nil {
		t.Fatal(err)
	}
	return n
}
