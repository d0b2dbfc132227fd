package statecheck

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"berth/image/layer"
	"berth/image/lazy"
)

// Bytes: the content of each layer is unchanged. A layer has as many files and bytes as when it was
// created. Names, contents, owners and modes are compared if berth stored a checksum of them. The
// tree of a packed layer is unchanged byte by byte, with times and extended attributes, if berth
// stored its digest. The indexes of blobs are valid.

// compareBytes reads all layers only once, because layers are immutable.
func compareBytes(ctx context.Context, f *facts, report *Report) error {
	d := &finder{invariant: "bytes", found: &report.Differences}
	unsummed, incomplete := 0, 0
	for _, s := range f.layers.Layers {
		if s.Incomplete {
			incomplete++
			continue
		}
		if s.Sum.IsZero() {
			unsummed++
		}
		wrong, err := compareLayer(ctx, s)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if _, gone := os.Lstat(s.Dir); errors.Is(gone, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			wrong = mismatch{"a layer that can be read", err.Error()}
		}
		if wrong != (mismatch{}) {
			d.differ(s.Dir, wrong.want, "%s", wrong.got)
		}
	}
	if incomplete > 0 {
		report.Skipped = append(report.Skipped,
			fmt.Sprintf("bytes: %d layers are not complete yet; their content is verified when it arrives", incomplete))
	}
	if unsummed > 0 {
		report.Skipped = append(
			report.Skipped,
			fmt.Sprintf(
				"bytes: compared only the numbers of files and bytes of %d layers, which an earlier version stored without a checksum",
				unsummed,
			),
		)
	}
	return compareIndexes(f, d)
}

// compareIndexes checks that each index of a blob is valid. No image needs an index.
func compareIndexes(f *facts, d *finder) error {
	damaged, err := lazy.Inspect(f.imageRoot())
	if err != nil {
		return err
	}
	for path, err := range damaged {
		d.differ(path, "a valid index of a blob; delete it", "%v", err)
	}
	return nil
}

// mismatch is the expected and the actual state of a layer; empty if they are equal.
type mismatch struct{ want, got string }

func compareLayer(ctx context.Context, s layer.Stored) (mismatch, error) {
	used, err := s.Count(ctx)
	if err != nil {
		return mismatch{}, err
	}
	if used != s.Usage {
		return mismatch{
			fmt.Sprintf("%d files with %d bytes", s.Usage.Inodes, s.Usage.Bytes),
			fmt.Sprintf("%d files with %d bytes", used.Inodes, used.Bytes),
		}, nil
	}
	if s.Tree != "" {
		now, err := s.TreeNow(ctx)
		if err != nil {
			return mismatch{}, err
		}
		if now != s.Tree {
			return mismatch{
				fmt.Sprintf("a list of its files with the digest %.19s", s.Tree),
				fmt.Sprintf("%.19s, with the same number of blocks", now),
			}, nil
		}
	}
	if s.Sum.IsZero() {
		return mismatch{}, nil
	}
	now, err := s.SumNow(ctx)
	if err != nil || now == s.Sum {
		return mismatch{}, err
	}
	return mismatch{
		fmt.Sprintf("names, contents, owners and modes with the checksum %.16s", s.Sum),
		fmt.Sprintf("%.16s, with the same numbers of files and bytes", now),
	}, nil
}
