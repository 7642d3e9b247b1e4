/* An iSER disk that is written, read back and compared: `iser_disk URL INITIATOR SECONDS`. Prints
   how many blocks of 64 KiB were right. */
#include <iscsi/iscsi.h>
#include <iscsi/scsi-lowlevel.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SECTOR = 512, BLOCK = 64 << 10, BLOCKS = 256 };

static int fails(const char *what, struct iscsi_context *iscsi)
{
    fprintf(stderr, "%s: %s\n", what, iscsi_get_error(iscsi));
    return 1;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    struct iscsi_context *iscsi = iscsi_create_context(argv[2]);
    struct iscsi_url *url = iscsi ? iscsi_parse_full_url(iscsi, argv[1]) : NULL;
    if (!url)
        return fails("the URL", iscsi);
    iscsi_set_session_type(iscsi, ISCSI_SESSION_NORMAL);
    iscsi_set_targetname(iscsi, url->target);
    if (iscsi_full_connect_sync(iscsi, url->portal, url->lun))
        return fails("login", iscsi);
    static unsigned char block[BLOCK];
    unsigned long right = 0;
    double end = now() + atof(argv[3]);
    for (uint32_t turn = 0; now() < end; turn++) {
        uint32_t at = turn % BLOCKS * (BLOCK / SECTOR);
        for (int i = 0; i < BLOCK; i += 4)
            memcpy(block + i, &(uint32_t){ turn * 2654435761u + i }, 4);
        struct scsi_task *task =
            iscsi_write10_sync(iscsi, url->lun, at, block, BLOCK, SECTOR, 0, 0, 0, 0, 0);
        if (!task || task->status != SCSI_STATUS_GOOD)
            return fails("writing", iscsi);
        scsi_free_scsi_task(task);
        task = iscsi_read10_sync(iscsi, url->lun, at, BLOCK, SECTOR, 0, 0, 0, 0, 0);
        if (!task || task->status != SCSI_STATUS_GOOD || task->datain.size != BLOCK)
            return fails("reading", iscsi);
        if (memcmp(task->datain.data, block, BLOCK))
            return fprintf(stderr, "block %u is wrong\n", turn), 1;
        scsi_free_scsi_task(task);
        if (++right % 16 == 1)
            printf("%lu\n", right), fflush(stdout);
    }
    printf("right: %lu\n", right);
    return right == 0;
}
