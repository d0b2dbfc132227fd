package criu_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	criu_core "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mm"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pagemap"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pstree"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/rseq"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/vma"
	"google.golang.org/protobuf/proto"

	"berth/internal/testutil"
	"berth/shim/launcher/criu"
)

// Bits of a mapping's status and flags, and addresses of the process of the tests.
const (
	regular, file, anonymous = 1, 1 << 6, 1 << 9
	vsyscall, vdso, vvar     = 1 << 2, 1 << 3, 1 << 12
	sharedMemory, guard      = 1 << 8, 1 << 16
	private, shared          = 2, 1

	dataAt    = 0x500000
	vvarAt    = 0x7fff00000000
	vdsoAt    = vvarAt + 4<<16
	topAt     = 0xffffffffff600000
	area      = dataAt + 64
	leader    = 7
	otherTask = 8
)

// process is a saved process with a program, data with an rseq area, vDSO and vsyscall.
type process struct {
	state    uint32
	maps     []*vma.VmaEntry
	rseq     *rseq.RseqEntry
	pagemaps []*pagemap.PagemapEntry
	pages    []byte // two of data, two of the vDSO
	pageSize int
}

func mapped(start, size uint64, flags, status uint32) *vma.VmaEntry {
	return &vma.VmaEntry{Start: proto.Uint64(start), End: proto.Uint64(start + size), Flags: &flags, Status: &status}
}

func content(address uint64, count, flags uint32) *pagemap.PagemapEntry {
	return &pagemap.PagemapEntry{Vaddr: &address, CompatNrPages: &count, Flags: &flags}
}

const present = 4

// kernelVDSO is the vDSO of the tests' kernel.
func kernelVDSO(pageSize int) []byte { return bytes.Repeat([]byte{0xcc}, 2*pageSize) }

func usualProcess(pageSize int) *process {
	page := uint64(pageSize)
	return &process{
		state: 1,
		maps: []*vma.VmaEntry{
			mapped(0x400000, page, private, regular|file), mapped(dataAt, 2*page, private, regular|anonymous),
			mapped(vvarAt, 4*page, private, regular|vvar|anonymous), mapped(vdsoAt, 2*page, private, regular|vdso|anonymous),
			mapped(topAt, page, private, vsyscall|anonymous),
		},
		rseq:     &rseq.RseqEntry{RseqAbiPointer: proto.Uint64(area), RseqAbiSize: proto.Uint32(32)},
		pagemaps: []*pagemap.PagemapEntry{content(dataAt, 2, present), content(vdsoAt, 2, present)},
		pages:    append(make([]byte, 2*page), kernelVDSO(pageSize)...),
		pageSize: pageSize,
	}
}

// write makes the images of the process. Its second thread has its rseq area.
func (p *process) write(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	image(t, dir, "pstree.img", tree, &pstree.PstreeEntry{Pid: proto.Uint32(leader), Threads: []uint32{leader, otherTask}})
	task := &criu_core.TaskCoreEntry{TaskState: &p.state}
	image(t, dir, "core-7.img", core, &criu_core.CoreEntry{Tc: task, ThreadCore: &criu_core.ThreadCoreEntry{}})
	image(t, dir, "core-8.img", core, &criu_core.CoreEntry{ThreadCore: &criu_core.ThreadCoreEntry{RseqEntry: p.rseq}})
	image(t, dir, "mm-7.img", memory, &mm.MmEntry{Vmas: p.maps})
	entries := []proto.Message{&pagemap.PagemapHead{PagesId: proto.Uint32(1)}}
	for _, e := range p.pagemaps {
		entries = append(entries, e)
	}
	image(t, dir, "pagemap-7.img", pagemaps, entries...)
	testutil.Must(t, os.WriteFile(filepath.Join(dir, "pages-1.img"), p.pages, 0o600))
	return dir
}

func (p *process) check(t *testing.T, dir string) error {
	return criu.Check(open(t, dir), kernelVDSO(p.pageSize), p.pageSize)
}

// Each unusual form is refused by its name, with each size of pages that arm64 has.
func TestCheck(t *testing.T) {
	t.Parallel()
	for _, pageSize := range []int{4 << 10, 16 << 10, 64 << 10} {
		t.Run(strconv.Itoa(pageSize), func(t *testing.T) { testCheck(t, uint64(pageSize)) })
	}
}

func testCheck(t *testing.T, page uint64) {
	t.Parallel()
	guardPages := func(p *process) { p.maps = append(p.maps, mapped(dataAt+page, page, 0, guard)) }
	moveRseq := func(to uint64) func(*process) { return func(p *process) { p.rseq.RseqAbiPointer = &to } }
	const inMemory, isVDSO = "not in one private anonymous mapping", "its vDSO is not that of this kernel"
	for name, tc := range map[string]struct {
		change func(*process)
		want   string // empty: nothing is refused
	}{
		"usual":              {func(*process) {}, ""},
		"no rseq":            {func(p *process) { p.rseq = nil }, ""},
		"guard pages":        {guardPages, ""},
		"no vDSO":            {func(p *process) { p.maps = append(p.maps[:3], p.maps[4]) }, ""},
		"zombie":             {func(p *process) { p.state, p.maps = 6, nil }, ""},
		"changed vDSO":       {func(p *process) { p.pages[len(p.pages)-1] ^= 1 }, isVDSO},
		"vDSO of two sizes":  {func(p *process) { *p.maps[3].End += page }, isVDSO},
		"vDSO of a file":     {func(p *process) { *p.maps[3].Status = regular | vdso | file }, isVDSO},
		"vDSO without pages": {func(p *process) { p.pagemaps = p.pagemaps[:1] }, isVDSO},
		"lazy vDSO":          {func(p *process) { *p.pagemaps[1].Flags = 2 }, isVDSO},
		"two vDSOs": {func(p *process) {
			p.maps = append(p.maps[:4], mapped(vdsoAt+2*page, 2*page, private, regular|vdso|anonymous))
		}, "two vDSOs"},
		"rseq area in shared memory": {func(p *process) { *p.maps[1].Status = regular | sharedMemory }, inMemory},
		"rseq area shared by flags":  {func(p *process) { *p.maps[1].Flags = shared }, inMemory},
		"rseq area in a file":        {moveRseq(0x400040), inMemory},
		"rseq area in the vDSO":      {moveRseq(vdsoAt), inMemory},
		"rseq area nowhere":          {moveRseq(0x700000), inMemory},
		"rseq area beyond its end":   {moveRseq(dataAt + 2*page - 16), inMemory},
		"large rseq area":            {func(p *process) { p.rseq.RseqAbiSize = proto.Uint32(uint32(3 * page)) }, inMemory},
		"sequence in memory":         {func(p *process) { p.pages[area-dataAt+8] = 1 }, "a restartable sequence is in progress"},
		"sequence in the image": {func(p *process) { p.rseq.RseqCsPointer = proto.Uint64(1) },
			"a restartable sequence is in progress"},
		"descending":          {func(p *process) { p.maps[0], p.maps[1] = p.maps[1], p.maps[0] }, "is not behind the one before it"},
		"overlap":             {func(p *process) { *p.maps[0].End = dataAt + page }, "is not behind the one before it"},
		"empty":               {func(p *process) { *p.maps[0].End = 0x400000 }, "no such range"},
		"not a page":          {func(p *process) { *p.maps[0].End += page / 2 }, "no such range"},
		"too high":            {func(p *process) { *p.maps[3].End = 1 << 57 }, "no such range"},
		"unknown kind":        {func(p *process) { *p.maps[0].Status |= 1 << 30 }, "unknown status"},
		"behind vsyscall":     {func(p *process) { p.maps[3], p.maps[4] = p.maps[4], p.maps[3] }, "is not behind the one before it"},
		"vsyscall elsewhere":  {func(p *process) { *p.maps[4].Start = vdsoAt + 4*page }, "no such range"},
		"behind guard pages":  {func(p *process) { guardPages(p); p.maps = append(p.maps, p.maps[0]) }, "follows guard pages"},
		"guard pages descend": {func(p *process) { guardPages(p); guardPages(p) }, "is not behind the one before it"},
		"guard pages of a file": {func(p *process) { guardPages(p); *p.maps[5].Status |= file },
			"is of guard pages and of another kind"},
		"pages of another checkpoint": {func(p *process) { p.pagemaps[0].InParent = proto.Bool(true) }, "is in another checkpoint"},
		"pages twice":                 {func(p *process) { p.pagemaps[1].Vaddr = proto.Uint64(dataAt + page) }, "are not in order"},
		"endless pages":               {func(p *process) { p.pagemaps[1].NrPages = proto.Uint64(1 << 60) }, "are not in order"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := usualProcess(int(page))
			tc.change(p)
			err := p.check(t, p.write(t))
			var refused *criu.Refused
			if tc.want == "" && err != nil || tc.want != "" &&
				(!errors.As(err, &refused) || !strings.HasPrefix(refused.Reason, "process 7: ") || !strings.Contains(refused.Reason, tc.want)) {
				t.Errorf("%v, want %q", err, tc.want)
			}
		})
	}
}

// A missing image is refused.
func TestCheckNeedsImages(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"pstree.img", "core-7.img", "core-8.img", "mm-7.img", "pages-1.img"} {
		p := usualProcess(os.Getpagesize())
		dir := p.write(t)
		testutil.Must(t, os.Remove(filepath.Join(dir, name)))
		if err := p.check(t, dir); err == nil {
			t.Errorf("without %s: no error", name)
		}
	}
}

// The vDSO of this process is a program in whole pages.
func TestVDSO(t *testing.T) {
	t.Parallel()
	got, err := criu.VDSO()
	testutil.Must(t, err)
	if len(got) == 0 || len(got)%os.Getpagesize() != 0 || !bytes.HasPrefix(got, []byte("\x7fELF")) {
		t.Errorf("%d bytes: %.4q", len(got), got)
	}
}
