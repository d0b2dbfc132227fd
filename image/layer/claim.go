package layer

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/checkpoint/record"
	"berth/image/lazy"
	"berth/image/lazy/index"
	"berth/image/tree"
	"berth/image/unpack"
	"berth/image/unpack/tarsplit"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
)

// claimFile has the Claim of an incomplete layer. The layer is complete after its proof.
const claimFile = "claim"

// Claim is what an index from another node needs. The tree, the record and the points of such an
// index may be false. They are proven when the whole tar is there (Prove). Until then the layer has
// a claimFile, so a restart cannot lose the proof.
type Claim struct {
	Peer     string `json:"peer"`              // address of the node that has sent the index
	Registry string `json:"registry"`          // that has shown to have the blob
	Profile  []int  `json:"profile,omitempty"` // spans that processes have waited for on other nodes
	// Table names the table of contents in the blob, if the index was made of it. Then there is no
	// Peer.
	Table string `json:"table,omitempty"`
}

// maxClaim limits the length of a claimFile.
const maxClaim = 256 << 10

// writeClaim writes the claimFile in a directory.
func writeClaim(dir string, claim *Claim) error {
	text, err := json.Marshal(claim)
	if err != nil {
		return err
	}
	failpoint.Reach("layer.write-claim")
	err = os.WriteFile(filepath.Join(dir, claimFile), text, 0o600)
	failpoint.Reach("layer.claim-written")
	return err
}

// readClaim returns the Claim of an incomplete layer, or nil if its index needs no proof.
func readClaim(dir string) (*Claim, error) {
	f, err := os.Open(filepath.Join(dir, claimFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // none
	}
	if err != nil {
		return nil, err
	}
	defer f.Close() // read only
	claim := &Claim{}
	if err := json.NewDecoder(io.LimitReader(f, maxClaim)).Decode(claim); err != nil {
		return nil, fmt.Errorf("decode %s: %w", f.Name(), err)
	}
	return claim, nil
}

// Claims returns the Claims of the incomplete layers in a Store's directory by name: of those in
// their place, and of those set aside. A Claim that cannot be read is empty. The Store must not be
// open.
func Claims(root string) (placed, aside map[digest.Digest]*Claim, err error) {
	placed, err = claimsIn(filepath.Join(root, lazyDir))
	if err != nil {
		return nil, nil, err
	}
	aside, err = claimsIn(filepath.Join(root, lazyDir, record.SetAsideDir))
	return placed, aside, err
}

// claimsIn is Claims for one folder. Links are those of complete layers.
func claimsIn(folder string) (map[digest.Digest]*Claim, error) {
	entries, err := os.ReadDir(folder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("find the claims of layers: %w", err)
	}
	found := map[digest.Digest]*Claim{}
	for _, e := range entries {
		hex, _, _ := strings.Cut(e.Name(), ".") // entries that were set aside have a suffix
		name := digest.NewDigestFromEncoded(digest.SHA256, hex)
		if !e.IsDir() || name.Validate() != nil {
			continue
		}
		claim, err := readClaim(filepath.Join(folder, e.Name()))
		if err != nil {
			claim = &Claim{}
		}
		if claim != nil {
			found[name] = claim
		}
	}
	return found, nil
}

// UsageOf returns the disk usage of the complete layer of an index. An index from another node has
// no true one, because that node may have another filesystem.
func UsageOf(x *index.Index) Usage {
	sum := uint64(0)
	for _, size := range []int64{x.DataSize, int64(len(x.Tree)), int64(len(x.Record))} {
		sum += uint64((size + tree.BlockSize - 1) / tree.BlockSize * tree.BlockSize)
	}
	return Usage{Bytes: sum, Inodes: 3}
}

// Proven are the files of a layer whose index is true.
type Proven struct{ TreePath, RecordPath string }

// Prove unpacks the tar of an incomplete layer again and compares the result with all that the
// layer's index says: tree, record, length of the data and summary. It does not write the content
// of files again. The caller has verified the digest of the tar. Errors: DataLoss that wraps
// lazy.ErrWrongIndex if something differs, DataLoss if the tar is no valid layer.
//
// If the claim is a table of contents, it gets the blob in place of the tar: see proveBlob.
func (s *Store) Prove(ctx context.Context, name digest.Digest, tar io.Reader, limits unpack.Limits) (Proven, error) {
	l := s.lazy.get(name)
	info := s.layers.Get(name)
	if l == nil || info == nil {
		return Proven{}, errdefs.NotFound("incomplete layer %s", name)
	}
	if l.claimsTable() {
		return Proven{}, s.proveBlob(ctx, name, tar, limits)
	}
	failpoint.Reach("layer.make-proof")
	own, err := os.MkdirTemp(filepath.Join(s.root, tmpDir), name.Encoded()+"-")
	failpoint.Reach("layer.proof-made")
	if err != nil {
		return Proven{}, err
	}
	err = s.proveIn(ctx, own, info, tar, limits)
	if err := errors.Join(err, s.trash.Take(own, Usage{})); err != nil {
		return Proven{}, fmt.Errorf("prove the index of layer %s: %w", info.DiffID, err)
	}
	dir := s.incompleteDir(name)
	return Proven{filepath.Join(dir, treeFile), filepath.Join(dir, tarFile)}, nil
}

// proveIn is Prove with a directory for the files.
func (s *Store) proveIn(ctx context.Context, own string, info *Info, tar io.Reader, limits unpack.Limits) error {
	job := unpack.Job{Limits: limits, Algorithm: info.DiffID.Algorithm(), NoData: true}
	made, err := s.apply(ctx, own, info.Source, tar, job)
	if errdefs.Code(err) == codes.InvalidArgument {
		return errdefs.New(codes.DataLoss, "it is no valid layer: %w", err)
	}
	if err != nil {
		return err
	}
	claimed := s.incompleteDir(info.Name)
	treeNow, err := s.merger.TreeDigest(ctx, own, limits.WithDefaults().Memory)
	if err != nil {
		return err
	}
	switch {
	case made.Digest != info.DiffID || made.TarBytes != info.TarBytes:
		return errdefs.New(codes.DataLoss, "its tar has the digest %s", made.Digest)
	case treeNow != info.Tree:
		return lies("tree")
	case made.Opaque != info.Opaque || made.Whiteouts != info.Whiteouts || made.Sum != info.Sum:
		return lies("summary")
	}
	return errors.Join(sameSize(filepath.Join(own, dataFile), filepath.Join(claimed, dataFile)),
		sameContents(info.TarBytes, filepath.Join(own, tarFile), filepath.Join(claimed, tarFile)))
}

func lies(what string) error {
	return errdefs.New(codes.DataLoss, "%w: its layer has another %s", lazy.ErrWrongIndex, what)
}

// sameSize returns DataLoss if two data files have different lengths.
func sameSize(own, claimed string) error {
	a, err := os.Stat(own)
	if err != nil {
		return err
	}
	b, err := os.Stat(claimed)
	if err == nil && a.Size() != b.Size() {
		return lies("data file")
	}
	return err
}

// sameContents returns DataLoss if two records of a tar do not have the same content at the same
// places of the data file. The caller has verified that the claimed record gives the right tar.
func sameContents(tarBytes int64, own, claimed string) error {
	a, err := contentsOf(tarBytes, own)
	if err != nil {
		return err
	}
	b, err := contentsOf(tarBytes, claimed)
	if err == nil && a != b {
		return lies("record of its tar")
	}
	return err
}

// contentsOf returns a hash of where a record says that content is.
func contentsOf(tarBytes int64, path string) (sum [sha256.Size]byte, err error) {
	f, err := os.Open(path)
	if err != nil {
		return sum, err
	}
	defer f.Close() // read only
	st, err := f.Stat()
	if err != nil {
		return sum, err
	}
	r, err := tarsplit.Open(f, st.Size(), tarBytes, packedContent{})
	if err != nil {
		return sum, lostTar(err)
	}
	h := sha256.New()
	err = r.Contents(func(offset, size int64, at tarsplit.Ref) error {
		var b []byte
		for _, n := range []int64{offset, size, at.Offset, int64(len(at.Name))} {
			b = binary.LittleEndian.AppendUint64(b, uint64(n))
		}
		_, err := h.Write(append(b, at.Name...))
		return err
	})
	return [sha256.Size]byte(h.Sum(nil)), lostTar(err)
}
