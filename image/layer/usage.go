package layer

import (
	"context"
	"os"

	"berth/internal/diskusage"
)

// countTree counts a tree as unpacker.count does while it is made.
func countTree(root *os.File, block int64) (Usage, error) {
	u, err := diskusage.Nominal(context.Background(), root, block)
	return Usage{Bytes: u.Bytes, Inodes: u.Inodes}, err
}
