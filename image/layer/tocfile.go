package layer

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/opencontainers/go-digest"

	"berth/checkpoint/record"
	"berth/image/blobindex"
	"berth/image/tree"
	"berth/internal/failpoint"
)

// tocFile has the TOC of an incomplete layer. The layer is not complete before its proof.
const tocFile = "claim"

// TOC is the table of contents from which the index of an incomplete layer was made. The image's
// manifest names the table by its digest, but the table may describe other files than the tar has.
// Prove compares the table and the tar when the whole blob is present. Until then the layer has a
// tocFile, so a restart cannot lose the proof.
type TOC struct {
	Registry string `json:"registry"` // that has served the table
	Name     string `json:"table"`    // of the table, with its digest
}

// maxTOC limits the length of a tocFile.
const maxTOC = 256 << 10

// errOfNode is the error about a layer with an index of another node. Berth used such indexes while
// 0.3.0 was developed.
var errOfNode = errors.New("its index came from another node, which berth does not use any more")

// writeTOC writes the tocFile in a directory.
func writeTOC(dir string, toc *TOC) error {
	text, err := json.Marshal(toc)
	if err != nil {
		return err
	}
	failpoint.Reach("layer.write-claim")
	err = os.WriteFile(filepath.Join(dir, tocFile), text, 0o600)
	failpoint.Reach("layer.claim-written")
	return err
}

// readTOC returns the TOC of an incomplete layer, or nil if this node has made its index. If
// another node has made it, the error is errOfNode.
func readTOC(dir string) (*TOC, error) {
	f, err := os.Open(filepath.Join(dir, tocFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // none
	}
	if err != nil {
		return nil, err
	}
	defer f.Close() // read only
	toc := &TOC{}
	if err := json.NewDecoder(io.LimitReader(f, maxTOC)).Decode(toc); err != nil {
		return nil, fmt.Errorf("decode %s: %w", f.Name(), err)
	}
	if toc.Name == "" {
		return nil, errOfNode
	}
	return toc, nil
}

// Unproven returns the names of the incomplete layers in a Store's directory whose index was made
// from a table of contents. placed are in their place, and aside were set aside. The Store must not
// be open.
func Unproven(root string) (placed, aside []digest.Digest, err error) {
	placed, err = unprovenIn(filepath.Join(root, lazyDir))
	if err != nil {
		return nil, nil, err
	}
	aside, err = unprovenIn(filepath.Join(root, lazyDir, record.SetAsideDir))
	return placed, aside, err
}

// unprovenIn is Unproven for one folder. Links belong to complete layers.
func unprovenIn(folder string) (names []digest.Digest, err error) {
	entries, err := os.ReadDir(folder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("find layers that are not proven: %w", err)
	}
	for _, e := range entries {
		hex, _, _ := strings.Cut(e.Name(), ".") // entries that were set aside have a suffix
		name := digest.NewDigestFromEncoded(digest.SHA256, hex)
		if !e.IsDir() || name.Validate() != nil {
			continue
		}
		if toc, err := readTOC(filepath.Join(folder, e.Name())); toc != nil || err != nil {
			names = append(names, name)
		}
	}
	return names, nil
}

// UsageOf returns the disk usage of the complete layer of an index.
func UsageOf(x *blobindex.Index) Usage {
	sum := uint64(0)
	for _, size := range []int64{x.DataSize, int64(len(x.Tree)), int64(len(x.Record))} {
		sum += uint64((size + tree.BlockSize - 1) / tree.BlockSize * tree.BlockSize)
	}
	return Usage{Bytes: sum, Inodes: 3}
}
