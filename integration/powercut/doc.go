// Package powercut simulates power failures of a node at random moments, and checks how berth
// recovers.
//
// A daemon works on a filesystem on a logging disk (blocklog). It pulls and removes images, and
// runs and removes pods. From the log the tests derive any number of disks, each after a power
// failure at one position. They mount each disk, start a daemon on it as after a boot, and check
// its images, pods and addresses.
//
// The default is a few power failures. BERTH_TORTURE=1 makes 200 on each filesystem, and BERTH_CUTS
// sets the number. Random choices come from a seed, which the test prints. BERTH_SEED repeats a run
// as far as the kernel's timing allows.
package powercut
