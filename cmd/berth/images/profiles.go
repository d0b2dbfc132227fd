package images

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
)

// securityProfile is a profile in the output.
type securityProfile struct {
	Digest string   `json:"digest"` // of the stored profile, not of the artifact
	Size   uint64   `json:"size"`   // bytes
	Refs   []string `json:"refs"`
}

func profilesCommand(o *connection) *cobra.Command {
	var remove []string
	cmd := &cobra.Command{
		Use: "profiles", Short: "List the seccomp profiles that were pulled as OCI artifacts", Args: cli.NoArgs,
		Long: `List the seccomp profiles that were pulled as OCI artifacts. They are no images. The digest is
that of the stored profile, which artifacts of several references may share. kubelet removes unused
profiles. After --rm the next pod that needs the profile pulls it again.`,
	}
	cmd.Flags().StringSliceVar(&remove, "rm", nil, "remove the profile with this digest, or its first digits, instead")
	out := cli.AddOutput(cmd, "table")
	cmd.RunE = o.connected(func(c *call) error {
		reply, err := c.ListSecurityProfiles(c.Context(), &runtimeapi.ListSecurityProfilesRequest{})
		if err != nil {
			return client.Explain("list security profiles", err)
		}
		list := []securityProfile{}
		for _, p := range reply.GetProfiles() {
			list = append(list, securityProfile{p.GetDigest(), p.GetSize(), p.GetRefs()})
		}
		if len(remove) > 0 {
			return c.removeProfiles(list, remove)
		}
		if out.JSON() {
			return cli.PrintJSON(c.OutOrStdout(), list)
		}
		rows := [][]cli.Cell{cli.Cells("REFERENCE", "DIGEST", "SIZE")}
		for _, p := range list {
			for _, ref := range p.Refs {
				rows = append(rows, cli.Cells(ref, client.ShortID(p.Digest), cli.Bytes(p.Size)))
			}
		}
		return cli.Table(c.OutOrStdout(), rows)
	})
	return cmd
}

// removeProfiles removes the profiles of the list whose digests begin so. Each must be one profile.
func (c *call) removeProfiles(list []securityProfile, digests []string) error {
	for _, asked := range digests {
		if strings.TrimPrefix(asked, "sha256:") == "" {
			return fmt.Errorf("security profile %q: a digest is needed", asked)
		}
		var found []string
		for _, p := range list {
			if strings.HasPrefix(strings.TrimPrefix(p.Digest, "sha256:"), strings.TrimPrefix(asked, "sha256:")) {
				found = append(found, p.Digest)
			}
		}
		if len(found) != 1 {
			return fmt.Errorf("security profile %s: %d profiles have a digest that begins so", asked, len(found))
		}
		req := &runtimeapi.RemoveSecurityProfileRequest{Digest: found[0]}
		if _, err := c.RemoveSecurityProfile(c.Context(), req); err != nil {
			return client.Explain("security profile "+asked, err)
		}
	}
	return nil
}
