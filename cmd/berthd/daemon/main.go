package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"berth/cmd/config"
	"berth/internal/version"
	"berth/sandbox"
)

// Program is the name of the daemon's program, and of its process.
const Program = "berthd"

// Help describes the program. It is in the output of --help and in the man page.
const Help = `Run the daemon: serve CRI on a unix socket.

SIGTERM and SIGINT stop the daemon. All containers keep running, and the next
daemon takes them over. SIGHUP reloads the configuration. SIGUSR1 writes the
stacks of all goroutines to standard error. "berth config default" explains every
option.`

// Flags returns the daemon's flags.
func Flags() *pflag.FlagSet {
	flags := pflag.NewFlagSet(Program, pflag.ContinueOnError)
	config.AddFlags(flags)
	flags.BoolP("help", "h", false, "print this help")
	flags.BoolP("version", "v", false, "print the version")
	return flags
}

// Main runs the program berthd with its arguments, until a signal or the end of ctx stops it. It
// returns the exit code.
func Main(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	if err := run(ctx, args, stdout); err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", Program, err)
		return 1
	}
	return 0
}

func run(ctx context.Context, args []string, stdout io.Writer) error {
	flags := Flags()
	if err := flags.Parse(args); err != nil {
		return fmt.Errorf("%w: see %s --help", err, Program)
	}
	switch {
	case flags.Changed("help"):
		_, err := fmt.Fprintf(stdout, "%s\n\nUsage:\n  %s [flags]\n\nFlags:\n%s", Help, Program, flags.FlagUsages())
		return err
	case flags.Changed("version"):
		_, err := fmt.Fprintf(stdout, "%s version %s\n", Program, version.Full())
		return err
	case flags.NArg() > 0:
		return fmt.Errorf("unexpected argument %q: %s takes none", flags.Arg(0), Program)
	}
	load := func() (*config.Config, []string, error) { return config.Load(flags) }
	cfg, warnings, err := load()
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("the daemon must run as root")
	}
	ctx, stop := signal.NotifyContext(ctx, unix.SIGTERM, unix.SIGINT)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	setUpProcess()
	level := new(slog.LevelVar)
	names := new(sandbox.Names)
	log := newLogger(cfg, level, os.Stderr, names.Of)
	captureLibraryLog(log)
	for _, w := range warnings {
		log.Warn("obsolete configuration", "key", w)
	}
	return serve(ctx, cfg, newReloader(cfg, load, level, log), names, log)
}
