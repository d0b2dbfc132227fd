package packages

import (
	"os"
	"testing"

	"berth/integration/harness"
	"berth/integration/pages"
)

// pagesEnv names a directory with the pages of the checkout: README.md and docs.
const pagesEnv = "BERTH_PAGES"

// Blocks of pages that need systemd run here, page by page. The first page installs the package.
func TestPagesInGuest(t *testing.T) {
	if os.Getenv(pagesEnv) == "" {
		t.Skip(pagesEnv + " is not set: run contrib/guest -packages systemd")
	}
	all := harness.Get(pages.Read(os.Getenv(pagesEnv)))(t)
	dir := t.TempDir()
	harness.Must(t, os.Symlink(os.Getenv(packagesEnv)+"/old", dir+"/dist"))
	t.Cleanup(func() { run(t, "apt-get", "purge", "--yes", "berth") })
	for _, page := range pages.Places[pages.Guest].Pages {
		for _, b := range all[page] {
			if !b.RunsIn(pages.Guest) {
				continue
			}
			if page != "install.md" {
				run(t, "systemctl", "start", "berth") // an earlier block may have stopped it
			}
			out, err := b.Run(t.Context(), dir, "DEBIAN_FRONTEND=noninteractive")
			if err != nil {
				t.Fatal(err) // the next blocks depend on it
			}
			t.Logf("%s:\n%s", b.Name(), out)
		}
	}
}
