package verify

import (
	"fmt"
	"strings"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/memfd"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mm"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pagemap"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/vma"
	"google.golang.org/protobuf/proto"
)

// Kinds of mappings (CRIU's VMA_* bits).
const (
	vmaFilePrivate = 1 << 6
	vmaFileShared  = 1 << 7
	vmaSysV        = 1 << 10
	vmaSocket      = 1 << 11
	vmaUnsupported = 1 << 31
)

// checkMemory checks the mappings of all processes.
func (c *check) checkMemory() error {
	for pid, name := range c.images.numbered("mm") {
		process := fmt.Sprintf("process %d", pid)
		m, err := oneOf[mm.MmEntry](c.images, name, "MM")
		if err != nil {
			return err
		}
		if f, ok := c.files[m.GetExeFileId()]; !ok || f.kind != fdinfo.FdTypes_REG || f.external {
			c.differ(process+": program", "no file of the container", "a file of the container")
		}
		for _, v := range m.GetVmas() {
			c.checkMapping(process, v)
		}
	}
	return nil
}

func (c *check) checkMapping(process string, v *vma.VmaEntry) {
	field := fmt.Sprintf("%s: mapping %#x", process, v.GetStart())
	status := v.GetStatus()
	if status&(vmaSysV|vmaSocket|vmaUnsupported) != 0 {
		c.differ(field, fmt.Sprintf("kind %#x", status), "a mapping of memory or a file")
	}
	if status&(vmaFilePrivate|vmaFileShared) == 0 {
		return
	}
	c.checkOpenFlags(field, v.GetFdflags())
	if f, ok := c.files[uint32(v.GetShmid())]; v.GetShmid() > 1<<32-1 || !ok || f.external {
		c.differ(field, "no file of the images", "a file of the container")
	}
}

// maxSharedName limits the name of a memfd (memfd_create(2)).
const maxSharedName = 249

// checkShared checks images of pages and of shared memory. Each image of pages must have exactly
// the pages that its pagemap names.
func (c *check) checkShared() error {
	inodes, err := entriesOf[memfd.MemfdInodeEntry](c.images, "memfd.img", "MEMFD_INODE", nil)
	if err != nil {
		return err
	}
	for _, i := range inodes {
		if len(i.GetName()) > maxSharedName {
			c.differ("memfd: name", fmt.Sprintf("%d bytes", len(i.GetName())), fmt.Sprint(maxSharedName))
		}
	}
	seen := map[uint32]bool{}
	for _, name := range c.images.names {
		if strings.HasPrefix(name, "pagemap-") {
			if err := c.checkPagemap(name, seen); err != nil {
				return err
			}
		}
	}
	if c.e.Memory > 0 && c.Memory > c.e.Memory {
		c.differ("memory", fmt.Sprintf("%d bytes", c.Memory), fmt.Sprintf("%d bytes", c.e.Memory))
	}
	return nil
}

// checkPagemap checks a pagemap with its image of pages.
func (c *check) checkPagemap(name string, seen map[uint32]bool) error {
	const pageSize, inParent, present = 4096, 1, 4
	var head *pagemap.PagemapHead
	var all []*pagemap.PagemapEntry
	err := c.images.eachEntry(name, "PAGEMAP", func(i int) proto.Message {
		if i == 0 {
			head = new(pagemap.PagemapHead)
			return head
		}
		all = append(all, new(pagemap.PagemapEntry))
		return all[len(all)-1]
	}, nil)
	if err != nil {
		return err
	}
	var pages uint64
	for _, e := range all {
		n := e.GetNrPages()
		if e.NrPages == nil {
			n = uint64(e.GetCompatNrPages())
		}
		if e.GetInParent() || e.GetFlags()&inParent != 0 {
			c.differ("image "+name, "pages of another checkpoint", "pages of this one")
		} else if e.Flags == nil || e.GetFlags()&present != 0 {
			pages += min(n, 1<<40)
		}
	}
	if seen[head.GetPagesId()] {
		c.differ("image "+name, "pages of another process", "pages of its own")
	}
	seen[head.GetPagesId()] = true
	if pages == 0 && !c.images.has(fmt.Sprintf("pages-%d.img", head.GetPagesId())) {
		return nil
	}
	size, err := c.images.size(fmt.Sprintf("pages-%d.img", head.GetPagesId()))
	if err != nil {
		return err
	}
	if uint64(size) != pages*pageSize {
		c.differ("image "+name, fmt.Sprintf("%d pages for %d bytes", pages, size), "as many as the image of pages has")
	}
	c.Memory += size
	return nil
}
